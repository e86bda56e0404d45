"""Sequences contain every token of the texts exactly once as a target; padding is ignored."""

import hashlib
import math
import multiprocessing
import os
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.data import (
    BYTE_VOCABULARY,
    END_OF_TEXT,
    IGNORE_INDEX,
    Layout,
    Split,
    TokenDataset,
    decode,
    encode,
    open_dataset,
)
from dlo_lib.data import python_corpus as corpus_module
from dlo_lib.data.arithmetic import PROBLEMS_PER_DOCUMENT, TOKENS_PER_PROBLEM, arithmetic, entropy
from dlo_lib.data.documents import FlatDocuments, Selection
from dlo_lib.data.python_corpus import corpus_file, python_corpus, source_files
from dlo_lib.models import model_config


def flat(*texts: str) -> FlatDocuments:
    return FlatDocuments(np.concatenate([np.append(encode(text), np.uint16(END_OF_TEXT)) for text in texts]))


texts = st.lists(st.text("abc", max_size=12), min_size=1, max_size=6).filter(lambda texts: any(texts))


@given(texts=texts, seq=st.integers(1, 15))
def test_packed_targets_are_the_whole_text_without_its_first_token(texts, seq):
    documents = flat(*texts)
    dataset = TokenDataset(documents, seq)
    targets = torch.cat([dataset[index][1] for index in range(len(dataset))])
    valid = targets[targets != IGNORE_INDEX]
    assert torch.equal(valid, torch.from_numpy(documents.tokens[1:].astype(np.int64)))
    assert len(dataset) * seq - len(valid) < seq, "only the last sequence is filled up"


@given(texts=texts, seq=st.integers(1, 15))
def test_padded_documents_are_separate_and_keep_every_target(texts, seq):
    dataset = TokenDataset(flat(*texts), seq, Layout.PAD)
    targets = [dataset[index][1] for index in range(len(dataset))]
    read = "".join(decode(row[row != IGNORE_INDEX].numpy()) + "|" * (END_OF_TEXT in row) for row in targets)
    assert read == "".join(text[1:] + "|" for text in texts if text), "an empty text has nothing to predict"


@given(texts=texts, seq=st.integers(1, 15), layout=st.sampled_from(Layout))
def test_a_target_is_the_next_input(texts, seq, layout):
    dataset = TokenDataset(flat(*texts), seq, layout)
    for index in range(len(dataset)):
        inputs, targets = dataset[index]
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (seq,)
        valid = int((targets != IGNORE_INDEX).sum())
        assert valid > 0, "no sequence is empty"
        assert torch.equal(inputs[1:valid], targets[: valid - 1])
        assert (targets[valid:] == IGNORE_INDEX).all()
        assert 0 <= inputs.min() <= inputs.max() < dataset.vocab_size


def test_a_selection_reads_the_selected_documents():
    chosen = TokenDataset(Selection(flat("aa", "bbb", "cc", "dddd"), np.array([1, 3])), 4)
    alone = TokenDataset(flat("bbb", "dddd"), 4)
    assert len(chosen) == len(alone)
    assert all(torch.equal(a, b) for index in range(len(alone)) for a, b in zip(chosen[index], alone[index]))


def test_byte_tokens_match_the_vocabulary_of_the_tiny_model():
    text = "élan — 漢字\n"
    assert decode(encode(text)) == text
    assert decode(np.append(encode(text), END_OF_TEXT)) == text
    assert encode("").size == 0
    assert model_config("tiny").vocab_size == BYTE_VOCABULARY == END_OF_TEXT + 1


def test_invalid_sizes_raise_with_the_cure():
    with pytest.raises(UserError, match="seq is 0: use at least 1 token"):
        open_dataset("arithmetic", 0)
    with pytest.raises(UserError, match="the data set is empty: it needs a document of at least two tokens"):
        TokenDataset(flat(""), 4)
    with pytest.raises(IndexError):
        TokenDataset(flat("abc"), 4)[-1]


# The corpus


def test_the_documents_of_the_corpus_are_the_files_of_the_standard_library():
    documents = python_corpus()
    files = [file for file in source_files() if file.stat().st_size]
    assert 100 < len(documents.lengths) <= len(files)
    for index in (0, 17, len(documents.lengths) - 1):
        tokens = documents.read(index, 0, int(documents.lengths[index]))
        assert tokens[-1] == END_OF_TEXT
        assert tokens[:-1].astype(np.uint8).tobytes() == files[index].read_bytes()
    assert not any({"test", "site-packages"} & set(file.parts) for file in files)


def test_a_source_that_cannot_be_read_is_left_out(monkeypatch, tmp_path):
    (tmp_path / "a.py").touch()
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "missing")  # as in a minimal Debian
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path))
    assert source_files() == [tmp_path / "a.py"]


def test_the_corpus_is_memory_mapped_and_created_once():
    documents = python_corpus()
    assert isinstance(documents.tokens, np.memmap)
    assert not documents.tokens.flags.writeable
    made = corpus_file().stat()
    assert len(documents.tokens) <= corpus_module.MAX_BYTES + len(documents.lengths)
    python_corpus()
    assert corpus_file().stat().st_ino == made.st_ino


def test_the_corpus_is_limited_to_its_maximal_size(monkeypatch, tmp_path):
    monkeypatch.setenv("DLO_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 100_000)
    documents = python_corpus()
    assert 50_000 < len(documents.tokens) <= 100_000 + len(documents.lengths)


def _open_corpus(cache: str, barrier, results) -> None:
    os.environ["DLO_CACHE"] = cache
    barrier.wait()
    results.put(hashlib.sha256(python_corpus().tokens.tobytes()).hexdigest())


def test_several_processes_can_create_the_corpus_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 1_000_000)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_open_corpus, args=(str(tmp_path), barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    seen = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(seen) == 1
    assert [path.name for path in (tmp_path / "corpora").iterdir()] == [corpus_file().name], (
        "no temporary file is left"
    )


def test_a_damaged_corpus_raises_with_the_file_to_remove(monkeypatch, tmp_path):
    monkeypatch.setenv("DLO_CACHE", str(tmp_path))
    corpus_file().parent.mkdir()
    for damaged in (b"", b"odd", b"cut short"[:8]):
        corpus_file().write_bytes(damaged)
        with pytest.raises(UserError, match=r"the corpus .*u16 is damaged: remove it"):
            python_corpus()


def test_a_python_without_sources_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("DLO_CACHE", str(tmp_path))
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        UserError, match='no Python sources below .*: use a full Python, or data="arithmetic"'
    ):
        python_corpus()


def test_a_full_disk_leaves_no_incomplete_corpus(monkeypatch, tiny_disk):
    monkeypatch.setenv("DLO_CACHE", str(tiny_disk))
    with pytest.raises(UserError, match="no space left to write"):
        python_corpus()
    assert list((tiny_disk / "corpora").iterdir()) == []


@pytest.mark.parametrize("name", ["python", "arithmetic"])
def test_no_document_is_in_both_splits(name):
    train, validation = open_dataset(name, 64), open_dataset(name, 64, split=Split.VALIDATION)
    assert not set(train.documents.indices) & set(validation.documents.indices)
    everything = len(train.documents.documents.lengths)
    assert len(train.documents.indices) + len(validation.documents.indices) == everything
    assert 0.03 < len(validation.documents.indices) / everything < 0.06


# Additions


def test_the_additions_are_correct_and_the_same_on_every_machine():
    documents = arithmetic()
    text = decode(np.where(documents.tokens == END_OF_TEXT, ord("\n"), documents.tokens))
    for line in text.splitlines():
        problem, answer = line.split("=")
        first, second = problem.split("+")
        assert int(first) + int(second) == int(answer)
        assert (len(first), len(second), len(answer)) == (2, 2, 3)
    digest = hashlib.sha256(documents.tokens.astype("<u2").tobytes()).hexdigest()
    assert digest == "6d7c7968bc7cb0ee190c2c3d1b779cc23a5fd47bb098878a170af26f60f698f6"
    assert (arithmetic(100, seed=1).tokens != documents.tokens[:1000]).any()


def test_documents_of_additions_have_different_lengths():
    lengths = arithmetic().lengths
    assert (lengths % TOKENS_PER_PROBLEM == 0).all()
    assert len(set(lengths)) > 20
    assert lengths.mean() == pytest.approx(PROBLEMS_PER_DOCUMENT * TOKENS_PER_PROBLEM, rel=0.05)


def surprise(targets: np.ndarray) -> np.ndarray:
    """Return -ln of the probability of each target for a model that can add; the sequence starts with a
    problem.
    """
    column = np.arange(1, len(targets) + 1) % TOKENS_PER_PROBLEM
    p = 1 / PROBLEMS_PER_DOCUMENT
    known = np.where(targets == END_OF_TEXT, -math.log(p), -math.log(1 - p))
    return np.where(np.isin(column, [0, 1, 3, 4]), math.log(10), np.where(column == 9, known, 0.0))


def test_a_model_that_can_add_reaches_the_entropy():
    dataset = open_dataset("arithmetic", 100)
    losses = [surprise(dataset[index][1].numpy()) for index in range(1000)]
    assert dataset.best_loss == entropy() == pytest.approx(0.9587, abs=1e-4)
    assert np.mean(losses) == pytest.approx(dataset.best_loss, rel=5e-3)


def test_a_model_that_knows_only_the_positions_of_symbols_does_not():
    columns = arithmetic().tokens.reshape(-1, TOKENS_PER_PROBLEM)
    loss = 0.0
    for column in columns.T:
        shares = np.unique(column, return_counts=True)[1] / len(column)
        loss -= (shares * np.log(shares)).sum() / TOKENS_PER_PROBLEM
    assert loss == pytest.approx(1.49, abs=0.01)


# Hugging Face


@pytest.fixture
def save(tmp_path):
    """Write a Hugging Face data set with these columns and return its folder."""

    def to_disk(name: str = "data", **columns) -> str:
        from datasets import Dataset

        Dataset.from_dict(columns).save_to_disk(tmp_path / name)
        return str(tmp_path / name)

    return to_disk


def test_a_column_of_texts_is_read_as_bytes_with_end_tokens(save):
    rows = [f"line {number} — é" for number in range(40)] + [""]
    dataset = open_dataset(save(text=rows, other=list(range(41))), 32)
    assert dataset.vocab_size == BYTE_VOCABULARY
    tokens = np.concatenate(
        [
            dataset.documents.read(index, 0, int(length))
            for index, length in enumerate(dataset.documents.lengths)
        ]
    )
    assert np.array_equal(tokens, flat(*(row for index, row in enumerate(rows) if index % 20 != 19)).tokens)
    assert decode(dataset[0][0].numpy()).startswith("line 0 — é")


def test_a_column_of_tokens_is_read_without_changes(save):
    rows = [[5, 1, 70_000], [2, 2], [9]]
    dataset = open_dataset(save(input_ids=rows), 4)
    assert dataset.vocab_size == 70_001
    assert dataset[0][0].tolist() == [5, 1, 70_000, 2]
    padded = open_dataset(save("padded", tokens=rows), 4, layout=Layout.PAD, column="tokens")
    assert [padded[index][1].tolist() for index in range(len(padded))] == [
        [1, 70_000, -100, -100],
        [2, -100, -100, -100],
    ]


def test_the_splits_of_a_data_set_are_used_if_it_has_them(tmp_path):
    from datasets import Dataset, DatasetDict

    parts = {
        "train": Dataset.from_dict({"text": ["to learn"] * 3}),
        "validation": Dataset.from_dict({"text": ["to measure"]}),
    }
    DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert decode(open_dataset(tmp_path / "both", 8)[0][0].numpy()) == "to learn"
    assert decode(open_dataset(tmp_path / "both", 10, split=Split.VALIDATION)[0][0].numpy()) == "to measure"
    DatasetDict({"train": parts["train"]}).save_to_disk(tmp_path / "one")
    with pytest.raises(UserError, match='unknown split of .*one "validation": Known: train'):
        open_dataset(tmp_path / "one", 8, split=Split.VALIDATION)


@pytest.mark.parametrize(
    ("columns", "column", "message"),
    [
        ({"text": ["a b"]}, "texts", 'unknown column of .* "texts": did you mean text'),
        (
            {"first": ["a"], "second": ["b"]},
            None,
            "has the columns first, second: choose the one with the text with column=",
        ),
        ({"text": [1.5]}, None, 'column "text" holds double: use one of strings or of lists of integers'),
        ({"text": ["a", None]}, None, 'column "text" has 1 missing values'),
        ({"tokens": [[1, -1]]}, None, 'column "tokens" has no tokens, or missing or negative ones'),
        ({"tokens": [[1, None]]}, None, 'column "tokens" has no tokens, or missing or negative ones'),
    ],
)
def test_an_unreadable_column_raises_with_the_reason(save, columns, column, message):
    with pytest.raises(UserError, match=message):
        open_dataset(save(**columns), 4, column=column)


def test_unknown_names_and_missing_folders_raise(tmp_path):
    with pytest.raises(
        UserError, match='unknown data set "pyton": did you mean python. Known: arithmetic, python'
    ):
        open_dataset("pyton", 8)
    with pytest.raises(
        UserError, match="no folder .*nowhere: give one written by Dataset.save_to_disk, or a data set's name"
    ):
        open_dataset(tmp_path / "nowhere", 8)
    with pytest.raises(
        UserError, match="cannot be read as a Hugging Face data set: write it again with save_to_disk"
    ):
        open_dataset(tmp_path, 8)
    with pytest.raises(UserError, match='data set "python" has no columns'):
        open_dataset("python", 8, column="text")


@pytest.mark.parametrize(
    "module", [None, types.ModuleType("datasets")], ids=["missing", "a folder of that name instead"]
)
def test_a_missing_package_raises_with_the_cure(monkeypatch, tmp_path, module):
    monkeypatch.setitem(__import__("sys").modules, "datasets", module)
    with pytest.raises(UserError, match="datasets package, which is not installed: pip install datasets"):
        open_dataset(tmp_path, 8)
