"""Checkpoints are exchanged with transformers without changes; damage is reported and loses no file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlo_lib.base.errors import UserError
from dlo_lib.models import Llama, LlamaConfig, RopeScaling, model_config
from dlo_lib.models.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from dlo_lib.models.hf_config import config_from_hf, config_to_hf
from tests.lazy import Lazy

transformers = Lazy("transformers")


@pytest.fixture
def saved(tmp_path):
    """Save a checkpoint of ``tiny``; return its folder and the model."""
    torch.manual_seed(0)
    model = Llama(model_config("tiny"))
    folder = tmp_path / "tiny"
    save_checkpoint(model, folder)
    return folder, model


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 8_000])
def test_transformers_reads_what_we_write(config, tmp_path, max_shard_bytes):
    model = Llama(config, dtype=torch.float64)
    save_checkpoint(model, tmp_path, max_shard_bytes=max_shard_bytes)
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(config.vocab_size, (2, 12))
    # their norms compute in fp32
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-6, rtol=0)
    assert config_from_hf(theirs.config.to_dict()) == config
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_bytes > 8_000
    assert all(parameter.dtype == torch.float64 for parameter in theirs.parameters())


@pytest.mark.parametrize("max_shard_size", ["5GB", "8KB"])
def test_we_read_what_transformers_writes(config, tmp_path, max_shard_size):
    save_checkpoint(Llama(config), tmp_path / "ours")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    model = load_checkpoint(tmp_path / "theirs")
    assert model.config == config
    own = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    assert (model.lm_head.weight is model.embed_tokens.weight) == config.tied_embeddings


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_both_formats_of_rotary_positions_are_read(rope):
    table = config_to_hf(model_config("tiny"), torch.float32)
    del table["rope_theta"], table["rope_scaling"]
    assert config_from_hf(table | rope) == model_config("tiny")


def test_the_config_of_llama_3_2_3b_equals_that_on_the_hub():
    hub = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 128256,
    }  # fmt: skip
    assert config_from_hf(hub) == model_config("llama-3.2-3b")
    written = config_to_hf(model_config("llama-3.2-3b"), torch.bfloat16)
    assert {name for name in written if written[name] != hub[name]} == {"bos_token_id", "eos_token_id"}, (
        "these two belong to the tokenizer"
    )


def test_a_tied_embedding_is_stored_once_and_a_stored_copy_must_agree(saved):
    folder, model = saved
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
        folder / "model.safetensors",
    )
    assert same_weights(load_checkpoint(folder), model)
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / "model.safetensors"
    )
    with pytest.raises(
        UserError,
        match="ties its embeddings, but its lm_head.weight differs: set tie_word_embeddings to false",
    ):
        load_checkpoint(folder)


def test_the_dtype_is_the_stored_one_or_the_chosen_one(saved, tmp_path):
    _, model = saved
    save_checkpoint(model, tmp_path / "half", dtype=torch.bfloat16)
    assert load_checkpoint(tmp_path / "half").norm.weight.dtype == torch.bfloat16
    wide = load_checkpoint(tmp_path / "half", dtype=torch.float64, checkpointing=True)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert wide.checkpointing
    assert torch.equal(
        wide.layers[0].mlp.up_proj.weight, model.layers[0].mlp.up_proj.weight.bfloat16().double()
    )


def test_saving_again_removes_the_old_checkpoint_and_keeps_other_files(saved):
    folder, model = saved
    (folder / "tokenizer.json").write_text("{}")
    save_checkpoint(model, folder, max_shard_bytes=100_000)
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors" not in names
    assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} <= names
    assert same_weights(load_checkpoint(folder), model)
    save_checkpoint(model, folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "config.json", "model.safetensors"}


def test_no_shard_exceeds_the_limit_except_a_single_tensor(saved, tmp_path):
    _, model = saved
    save_checkpoint(model, tmp_path, max_shard_bytes=40_000)
    for shard in tmp_path.glob("model-*.safetensors"):
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())


def change(weights, **changes):
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        weights.pop(key, None) if tensor is None else weights.__setitem__(key, tensor)
    return weights


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model__norm__weight": None}, "model.norm.weight is missing"),
        ({"model__extra__weight": torch.zeros(1)}, "model.extra.weight is unexpected"),
        ({"model__norm__weight": torch.zeros(7)}, r"model.norm.weight is \(7,\) instead of \(64,\)"),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_named(saved, changes, fault):
    folder, _ = saved
    save_file(change(load_file(folder / "model.safetensors"), **changes), folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{fault}.*: copy the whole checkpoint again"):
        load_checkpoint(folder)


def test_many_faults_are_counted(saved):
    folder, _ = saved
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="embed_tokens.weight is missing, .* and 14 more"):
        load_checkpoint(folder)


def test_a_damaged_file_raises_one_line_with_the_cure(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"model.safetensors is damaged or cut short .*: copy it again"
        ) as raised:
            load_checkpoint(folder)
        assert "\n" not in str(raised.value)


def test_a_missing_shard_is_named(saved):
    folder, model = saved
    save_checkpoint(model, folder, max_shard_bytes=100_000)
    first = min(folder.glob("model-*.safetensors"))
    first.unlink()
    with pytest.raises(
        UserError, match=f"has no {first.name} of its model.safetensors.index.json: copy the whole checkpoint"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 64', "config.json is damaged"),
        ("[]", "config.json is damaged"),
        ("{}", "model_type = None, Llama supports 'llama'"),
        ('{"model_type": "llama"}', "config.json has no vocab_size"),
        (
            json.dumps(config_to_hf(model_config("tiny"), torch.float32) | {"attention_bias": True}),
            "attention_bias = True",
        ),
        (
            json.dumps(config_to_hf(model_config("tiny"), torch.float32) | {"num_key_value_heads": 3}),
            "must be a multiple of num_kv_heads",
        ),
        (
            json.dumps(
                config_to_hf(model_config("tiny"), torch.float32)
                | {"rope_scaling": {"type": "linear", "factor": 2}}
            ),
            '"linear"',
        ),
    ],
)
def test_a_config_that_is_damaged_or_not_a_llama_raises(saved, text, message):
    folder, _ = saved
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_checkpoint(folder)


def test_missing_files_are_named(saved, tmp_path):
    folder, _ = saved
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no model.safetensors in"):
        load_checkpoint(folder)
    with pytest.raises(UserError, match="no config.json in .*: give the folder of a Hugging Face checkpoint"):
        load_checkpoint(tmp_path)


def test_a_full_disk_keeps_the_old_checkpoint(tiny_disk):
    model = Llama(model_config("tiny"))
    save_checkpoint(model, tiny_disk)
    names = sorted(path.name for path in tiny_disk.iterdir())
    with pytest.raises(UserError, match=r"no space left to write .*model.safetensors: free some space"):
        save_checkpoint(Llama(model_config("tiny")), tiny_disk, dtype=torch.float64)
    with pytest.raises(UserError, match=r"no space left to write .*model-0000\d-of-.*: free some space"):
        save_checkpoint(Llama(model_config("tiny")), tiny_disk, dtype=torch.float64, max_shard_bytes=200_000)
    assert sorted(path.name for path in tiny_disk.iterdir()) == names
    assert same_weights(load_checkpoint(tiny_disk), model)


def test_a_checkpoint_is_found_by_its_name_on_the_cluster(saved, tmp_path, monkeypatch):
    folder, model = saved
    shutil.copytree(folder, tmp_path / "HuggingFace_Models" / "meta-llama" / "Llama-3.2-3B")
    monkeypatch.setenv("DSDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert (
        find_checkpoint("meta-llama/Llama-3.2-3B")
        == tmp_path / "HuggingFace_Models" / "meta-llama" / "Llama-3.2-3B"
    )
    assert same_weights(load_checkpoint("meta-llama/Llama-3.2-3B"), model)
    assert find_checkpoint("tiny").resolve() == folder, "a folder comes first"
    with pytest.raises(UserError, match="did you mean meta-llama/Llama-3.2-3B"):
        find_checkpoint("meta-llama/Llama-3.2-3b")
    monkeypatch.delenv("DSDIR")
    with pytest.raises(UserError, match="no folder meta-llama/Llama-3.2-3B: give one with config.json"):
        find_checkpoint("meta-llama/Llama-3.2-3B")


def test_loading_copies_the_tensors_into_new_storage(saved):
    folder, _ = saved
    model = load_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")  # breaks a model that is a view of the file
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(
        list(model.parameters())
    )


def test_every_field_of_a_configuration_survives_the_round_trip():
    config = LlamaConfig(
        vocab_size=11, hidden=6, intermediate=7, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=10,
        max_positions=99, rope_theta=123.0, rope_scaling=RopeScaling(3.0, 1.5, 5.0, 77), norm_eps=3e-4,
        tied_embeddings=True, initializer_std=0.3,
    )  # fmt: skip
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, torch.float16)))) == config
