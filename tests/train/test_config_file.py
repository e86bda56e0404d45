"""``--config FILE`` reads options from TOML; the command line takes precedence."""

from __future__ import annotations

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.train.__main__ import parse


def test_the_options_of_a_file_and_of_the_command_line(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        'parallel = "fsdp"\ndp_shard = 4\nmicro-batches = 2\nprecision = "bf16"\ncheckpointing = true\n'
        "compile = false\nlr = 1e-4\n".replace("micro-batches", "accumulation")
    )
    config = parse(["--config", str(file), "--lr", "1e-3", "--model", "tiny"])
    assert config is not None
    assert (config.parallel.value, config.dp_shard, config.accumulation) == ("fsdp", 4, 2)
    assert (config.precision.value, config.checkpointing, config.compile, config.lr) == (
        "bf16",
        True,
        False,
        1e-3,
    )
    assert parse([f"--config={file}"]).lr == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_shardd = 2", r'plan.toml: unknown option "dp_shardd": did you mean dp_shard'),
        ("dp_shard = [2]", r"dp_shard is \[2\]: give a text, a number, true or false"),
        ("dp_shard", "plan.toml is not a readable TOML file"),
        ("seq = 0", "seq is 0: use at least 1"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        parse(["--config", str(tmp_path / "plan.toml")])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a readable TOML file: .*No such file"):
        parse(["--config", str(tmp_path / "none.toml")])
    with pytest.raises(UserError, match="--config names no file: --config plan.toml"):
        parse(["--config"])
