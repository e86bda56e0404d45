"""Generate the text corpora before their first use and print their sizes: `python datasets/make.py`."""

import sys

from dlo_lib.base.errors import EXIT_BAD_INPUT, UserError
from dlo_lib.base.text import tr
from dlo_lib.data import Layout, Split, open_dataset
from dlo_lib.data.open import NAMES
from dlo_lib.data.python_corpus import corpus_file

SEQ = 1024


def main() -> int:
    try:
        for name in NAMES:
            for split in Split:
                dataset = open_dataset(name, SEQ, split=split, layout=Layout.PACK)
                lengths = dataset.documents.lengths
                size = tr(
                    "{documents:,} documents, {tokens:,} tokens, {sequences:,} sequences of {seq}",
                    documents=len(lengths), tokens=int(lengths.sum()), sequences=len(dataset), seq=SEQ,
                )  # fmt: skip
                print(f"{name:<11} {split.value:<11} {size}")
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    print(tr("python is stored in {path}", path=corpus_file()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
