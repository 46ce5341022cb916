"""What each tool leaves is found, and refused with a line that names the file that is missing or cut off."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import check_name, check_step
from raftkv.errors import ConfigError
from raftkv.integrations.importers import formats, source
from raftkv.integrations.importers.candidate import Candidate, Facts
from raftkv.integrations.importers.importing import TOOLS, detect, wrong_trackers
from raftkv.integrations.importers.source import Listing, Source
from tests.integrations.importers import fabricated as made

SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
SHARDED = {"model.safetensors.index.json": made.index(SHARDS), **{name: made.safetensors() for name in SHARDS}}
LIGHTNING = made.torch_file(epoch=3, global_step=400)

WHOLE = {
    "trainer": ("checkpoint-40", made.trainer(40, eval_loss=0.5), "safetensors", 40),
    "trainer with shards": (
        "checkpoint-40",
        {**{k: v for k, v in made.trainer(40).items() if k != "model.safetensors"}, **SHARDED},
        "safetensors",
        40,
    ),
    "trainer, weights alone": (
        "checkpoint-40",
        {name: made.trainer(40)[name] for name in ("model.safetensors", "trainer_state.json")},
        "safetensors",
        40,
    ),
    "trainer with DeepSpeed": (
        "checkpoint-40",
        {name: data for name, data in made.trainer(40).items() if name not in ("optimizer.pt", "model.safetensors")}
        | made.below("global_step40", made.deepspeed()),
        "deepspeed_zero",
        40,
    ),
    "trainer with FSDP": (
        "checkpoint-40",
        {name: data for name, data in made.trainer(40).items() if name not in ("optimizer.pt", "model.safetensors")}
        | made.below("pytorch_model_fsdp_0", made.dcp())
        | made.below("optimizer_0", made.dcp()),
        "dcp",
        40,
    ),
    "dcp": ("step-400", made.dcp(), "dcp", 400),
    "dcp per rank": ("step_400", made.dcp_per_rank(), "dcp_per_rank", 400),
    "lightning, sharded": ("epoch=0-step=400.ckpt", made.dcp(), "dcp", 400),
    "lightning": ("checkpoints", {"epoch=3-step=400-val_loss=0.25.ckpt": LIGHTNING}, "torch_save", 400),
    "lightning, last": ("checkpoints", {"last.ckpt": LIGHTNING}, "torch_save", 400),
    "deepspeed": ("global_step40", made.deepspeed(), "deepspeed_zero", 40),
    "megatron": ("iter_0000400", made.megatron(), "megatron_dist", 400),
    "megatron, a folder a rank": ("iter_0000400", made.megatron_ranks(), "torch_save", 400),
    "orbax": ("400", made.orbax(loss=0.25), "orbax", 400),
    "variables": ("model", made.tf_variables("model.ckpt-400"), "tf_variables", 400),
    "saved model": ("7", made.saved_model(), "tf_savedmodel", 7),
    "frozen": ("graphs", {"frozen-400.pb": b"x"}, "tf_frozen", 400),
    "safetensors": ("step-400", SHARDED, "safetensors", 400),
    "safetensors that say their step": ("model", {"w.safetensors": made.safetensors(step="7")}, "safetensors", 7),
}


def only(root: Path) -> tuple[Candidate, Facts]:
    found = Source(str(root))
    (candidate,) = detect(found.listing)
    return candidate, TOOLS[candidate.tool].inspect(candidate, found)


@pytest.mark.parametrize("depth", ["", "runs/a/"])
@pytest.mark.parametrize("name", WHOLE)
def test_checkpoints_of_tools_are_found_with_their_steps(tmp_path, name, depth):
    directory, files, kind, step = WHOLE[name]
    made.write(tmp_path / depth / directory, files)
    candidate, facts = only(tmp_path)
    assert (candidate.kind, facts.step) == (kind, step)
    assert candidate.sources == {f"{depth}{directory}/{file}" for file in files}
    assert only(tmp_path / depth / directory)[1].step == step


def test_metrics_that_a_tool_noted(tmp_path):
    made.write(tmp_path / "a/checkpoint-40", made.trainer(40, loss=1.5, eval_loss=0.5, eval_runtime=3, grad_norm=2))
    made.write(tmp_path / "b", {"epoch=3-step=400-val_loss=0.25.ckpt": LIGHTNING})
    made.write(tmp_path / "c/400", made.orbax(loss=0.75, bad=float("nan")))
    found = [only(tmp_path / name)[1] for name in "abc"]
    assert [dict(facts.metrics) for facts in found] == [
        {"loss": 1.5, "eval_loss": 0.5},
        {"val_loss": 0.25},
        {"loss": 0.75},
    ]
    assert found[1].metadata == {"epoch": "3"}


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in names}


def cut(files: dict[str, bytes], name: str, size: int = -9) -> dict[str, bytes]:
    return {**files, name: files[name][:size]}


TRAINER = made.trainer(40)
BROKEN = {
    "no state": (
        "checkpoint-40",
        without(TRAINER, "trainer_state.json"),
        "checkpoint-40/trainer_state.json is missing",
    ),
    "half a state": ("checkpoint-40", cut(TRAINER, "trainer_state.json"), "trainer_state.json is not JSON"),
    "another step": ("checkpoint-41", TRAINER, "trainer_state.json is of another step"),
    "no model": ("checkpoint-40", without(TRAINER, "model.safetensors"), "checkpoint-40/model.safetensors is missing"),
    "half a model": ("checkpoint-40", cut(TRAINER, "model.safetensors"), "model.safetensors has "),
    "half an optimizer": ("checkpoint-40", cut(TRAINER, "optimizer.pt", -30), "optimizer.pt is cut off after"),
    "empty optimizer": ("checkpoint-40", cut(TRAINER, "optimizer.pt", 0), "optimizer.pt is empty"),
    "no optimizer": ("checkpoint-40", without(TRAINER, "optimizer.pt"), "checkpoint-40/optimizer.pt is missing"),
    "no random state": ("checkpoint-40", without(TRAINER, "rng_state.pth"), "checkpoint-40/rng_state.pth is missing"),
    "a rank's random state": (
        "checkpoint-40",
        {**without(TRAINER, "rng_state.pth"), "rng_state_0.pth": b"x", "rng_state_2.pth": b"x"},
        "rng_state_1.pth is missing",
    ),
    "a shard": ("m-40", without(SHARDED, SHARDS[1]), f"m-40/{SHARDS[1]} is missing, and model.safetensors.index.json"),
    "a shard without an index": ("m-40", {SHARDS[0]: made.safetensors(), SHARDS[2]: made.safetensors()}, SHARDS[1]),
    "an index alone": (
        "m-40",
        {"model.safetensors.index.json": made.index(SHARDS)},
        f"{SHARDS[0]} and 2 more is missing",
    ),
    "no metadata": ("step-4", without(made.dcp(), ".metadata"), "step-4/.metadata is missing: it is written last"),
    "half metadata": ("step-4", cut(made.dcp(), ".metadata"), ".metadata is cut off"),
    "a shard of dcp": (
        "step-4",
        without(made.dcp(), "__1_0.distcp"),
        "__1_0.distcp is missing, and .metadata names it",
    ),
    "half a shard": ("step-4", cut(made.dcp(), "__1_0.distcp", -30), "__1_0.distcp is cut off"),
    "half of the items of a shard": (
        "step-4",
        {**made.dcp(), "__1_0.distcp": made.torch_file()},
        f"__1_0.distcp is cut off after {len(made.torch_file())} of {2 * len(made.torch_file())} bytes",
    ),
    "a rank's metadata": ("step-4", without(made.dcp_per_rank(), "__0.metadata"), "__0.metadata is missing"),
    "half a ckpt": ("c", {"last.ckpt": LIGHTNING[:-30]}, "c/last.ckpt is cut off"),
    "a rank of DeepSpeed": (
        "global_step40",
        without(made.deepspeed(3), "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt is missing: there are 3 ranks",
    ),
    "a rank of DeepSpeed under the Trainer": (
        "checkpoint-40",
        without(TRAINER, "optimizer.pt", "model.safetensors")
        | made.below("global_step40", without(made.deepspeed(), "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")),
        "checkpoint-40/global_step40/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",
    ),
    "no model of DeepSpeed": (
        "global_step40",
        without(made.deepspeed(), "mp_rank_00_model_states.pt"),
        "mp_rank_00_model_states.pt is missing",
    ),
    "no common.pt": ("iter_0000400", without(made.megatron(), "common.pt"), "iter_0000400/common.pt is missing"),
    "a rank of Megatron": (
        "iter_0000400",
        without(made.megatron_ranks(), "mp_rank_01_001/model_optim_rng.pt"),
        "has files of 3 ranks: there must be 4",
    ),
    "a temporary step": ("400.orbax-checkpoint-tmp-17", made.orbax(), "400.orbax-checkpoint-tmp-17 is temporary"),
    "no commit": (
        "400",
        {**made.orbax(), "_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": null}'},
        "has no time of a commit",
    ),
    "an item": ("400", {k: v for k, v in made.orbax().items() if "/" not in k}, "400/default/ is missing"),
    "its data": ("400", without(made.orbax(), "default/d/0a1b"), "400/default/d/ is missing"),
    "data of variables": (
        "tf",
        without(made.tf_variables("model.ckpt-4"), "model.ckpt-4.data-00001-of-00002"),
        "tf/model.ckpt-4.data-00001-of-00002 is missing",
    ),
    "index of variables": (
        "tf",
        without(made.tf_variables("model.ckpt-4"), "model.ckpt-4.index"),
        "tf/model.ckpt-4.index is missing",
    ),
    "half an index": ("tf", cut(made.tf_variables("m-4"), "m-4.index"), "tf/m-4.index is cut off"),
    "no graph": (
        "7",
        without(made.saved_model(), "saved_model.pb"),
        "7/saved_model.pb is missing: the export was stopped",
    ),
    "no variables": (
        "7",
        without(made.saved_model(), "variables/variables.data-00000-of-00001"),
        "7/variables/variables.data-00000-of-00001 is missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_incomplete_checkpoint_is_refused_with_its_missing_file(tmp_path, name):
    directory, files, line = BROKEN[name]
    made.write(tmp_path / directory, files)
    with pytest.raises(NotWhole) as refused:
        only(tmp_path)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def hostile_header(length: int, text: bytes) -> bytes:
    return struct.pack("<Q", length) + text


NO_FILE = "is not a safetensors file: "
HOSTILE = {
    "a header of exabytes": (hostile_header(2**60, b"{}"), "is cut off within its header"),
    "a header that is too long": (
        hostile_header(formats.HEADER_MAX_BYTES + 1, bytes(formats.HEADER_MAX_BYTES + 10)),
        f"has a header of {formats.HEADER_MAX_BYTES + 1} bytes: at most",
    ),
    "a deep header": (hostile_header(200_000, b"[" * 200_000), NO_FILE),
    "a list": (hostile_header(2, b"[]"), NO_FILE),
    "text for an offset": (hostile_header(31, b'{"w":{"data_offsets":[0,"x"]}} '), NO_FILE),
    "an infinite offset": (made.with_header(b'{"w":{"data_offsets":[0,1e999]}}'), NO_FILE),
    "a number of a million digits": (hostile_header(1_000_024, b'{"w":{"data_offsets":[' + b"9" * 1_000_002), NO_FILE),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, name):
    data, why = HOSTILE[name]
    made.write(tmp_path / "step-4", {"w.safetensors": data})
    with pytest.raises(NotWhole, match=rf"w\.safetensors {why}"):
        only(tmp_path)


def test_json_is_bounded_and_hostile_names_are_no_metrics(tmp_path, monkeypatch):
    state = {"global_step": 4, "log_history": [{"step": 4, "eval_" + "x" * 999: 1, "eval_a": 10**400, "eval_b": True}]}
    made.write(tmp_path / "checkpoint-4", {**made.trainer(4), "trainer_state.json": json.dumps(state).encode()})
    assert only(tmp_path)[1].metrics == {}
    monkeypatch.setattr(source, "JSON_MAX_BYTES", 20)
    with pytest.raises(NotWhole, match="longer than 20 bytes"):
        only(tmp_path)


def test_names_in_a_file_do_not_reach_a_terminal_as_they_are(tmp_path):
    made.write(tmp_path / "m-4", {"model.safetensors.index.json": made.index(["a\n\x1b[31mb" + "c" * 10_000])})
    with pytest.raises(NotWhole) as refused:
        only(tmp_path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


def test_a_pickle_is_not_executed(tmp_path):
    marker = tmp_path / "executed"
    evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    made.write(tmp_path / "step-4", {**made.dcp(), ".metadata": evil, "__0_0.distcp": evil, "__1_0.distcp": evil})
    made.write(tmp_path / "c", {"epoch=0-step=5.ckpt": evil})
    found = Source(str(tmp_path))
    facts = [TOOLS[candidate.tool].inspect(candidate, found) for candidate in detect(found.listing)]
    assert [fact.step for fact in facts] == [4, 5]
    assert not marker.exists()


BAD = {
    "a backslash": (
        lambda path: path.with_name("a\\b.distcp").write_bytes(b"x"),
        r"'step-4/a\\\\b\.distcp' cannot be used",
    ),
    "a line's end": (lambda path: path.with_name("a\nb.distcp").write_bytes(b"x"), r"a\\nb\.distcp' cannot be used"),
    "no UTF-8": (lambda path: Path(os.fsdecode(bytes(path) + b"\xff")).write_bytes(b"x"), r"udcff' cannot be used"),
    "a link out": (lambda path: path.symlink_to("../../secret"), "step-4/extra is a link that leads out"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "step-4/extra is a link to nothing"),
    "a link to itself": (lambda path: path.symlink_to("extra"), "step-4/extra is a link to nothing"),
    "a link to a directory": (lambda path: path.symlink_to("../notes"), "step-4/extra/ is a link to a directory"),
    "a link to a directory outside": (lambda path: path.symlink_to("/etc"), "step-4/extra/ is a link that leads out"),
}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_name_refuses_the_checkpoint_that_it_lies_in_and_no_other(tmp_path, kind):
    made.write(tmp_path / "in/step-4", made.dcp())
    made.write(tmp_path / "in", {"step-5.ckpt": LIGHTNING, "notes/a.txt": b"x"})
    (tmp_path / "secret").write_bytes(b"x")
    make, line = BAD[kind]
    make(tmp_path / "in/step-4/extra")
    found = Source(str(tmp_path / "in"))
    bad, good = detect(found.listing)
    with pytest.raises(NotWhole, match=line) as refused:
        found.check(bad.sources)
    assert str(refused.value).isprintable()
    found.check(good.sources)


def test_file_that_a_link_in_the_directory_leads_to_belongs_to_the_checkpoint(tmp_path):
    made.write(tmp_path / "step-4", made.dcp())
    os.symlink("__0_0.distcp", tmp_path / "step-4/__2_0.distcp")
    found = Source(str(tmp_path / "step-4"))
    (candidate,) = detect(found.listing)
    found.check(candidate.sources)
    assert "__2_0.distcp" in candidate.files
    assert TOOLS[candidate.tool].inspect(candidate, found).step == 4


def test_nothing_and_too_much_are_told(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is nothing at"):
        Source(str(tmp_path / "nothing"))
    made.write(tmp_path, made.dcp())
    monkeypatch.setattr(source, "FILES_MAX", 2)
    with pytest.raises(ConfigError, match="has 3 files: at most 2"):
        Source(str(tmp_path))


def test_one_file_is_a_source_too(tmp_path):
    made.write(tmp_path, {"last.ckpt": LIGHTNING, "other.ckpt": LIGHTNING})
    found = Source(str(tmp_path / "last.ckpt"))
    (candidate,) = detect(found.listing)
    assert candidate.sources == {"last.ckpt"}
    assert TOOLS[candidate.tool].inspect(candidate, found).step == 400


def test_a_weight_file_beside_folders_of_the_trainer_takes_none_of_theirs(tmp_path):
    made.write(tmp_path, {"model.safetensors": made.safetensors(), "config.json": b"{}"})
    made.write(tmp_path / "checkpoint-4", made.trainer(4))
    found = detect(Source(str(tmp_path)).listing)
    assert [(candidate.tool, len(candidate.files)) for candidate in found] == [("trainer", 7), ("safetensors", 2)]


@pytest.mark.parametrize(
    ("tracker", "text", "line"),
    [
        ("latest", b"global_step40\n", None),
        ("latest", b"global_step80", "names global_step80, which is not there"),
        ("latest", b"", "names nothing: it is empty or cut off"),
        ("latest_checkpointed_iteration.txt", b"400", None),
        ("latest_checkpointed_iteration.txt", b"401", "names iter_0000401, which is not there"),
        ("latest_checkpointed_iteration.txt", b"", "names nothing"),
        ("checkpoint", b'model_checkpoint_path: "model.ckpt-4"\nall_model_checkpoint_paths: "x"\n', None),
        ("checkpoint", b'model_checkpoint_path: "\x1b[31m"\n', "names ?[31m, which is not there"),
        ("checkpoint", b'model_checkpoint_path: "/old/place/model.ckpt-5"\n', "names model.ckpt-5, which is not there"),
    ],
)
def test_a_tracker_that_names_what_is_not_there_is_told(tmp_path, tracker, text, line):
    made.write(tmp_path / "global_step40", made.deepspeed())
    made.write(tmp_path / "iter_0000400", made.megatron())
    made.write(tmp_path, {**made.tf_variables("model.ckpt-4"), tracker: text})
    found = Source(str(tmp_path))
    told = wrong_trackers(found, detect(found.listing))
    assert told.keys() == ({tracker} if line else set())
    assert line is None or line in told[tracker]


KEYS = ["global_step", "log_history", "step", "weight_map", "w", "data_offsets", "item_handlers"]
NAMES = [
    *"abc", "latest", "checkpoint-4", "iter_0000004", "global_step4", "4", "_CHECKPOINT_METADATA", ".metadata",
    "__0_0.distcp", "x.ckpt", "m.safetensors", "trainer_state.json", "m.index", "m.data-00000-of-00001",
    "saved_model.pb", "mp_rank_00_model_states.pt",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=6,
)
DAMAGE = st.one_of(
    st.binary(max_size=40).map(lambda data: ("bytes", data)),
    st.integers(0, 300).map(lambda size: ("cut", size)),
    JSON.map(lambda value: ("bytes", json.dumps(value).encode())),
    JSON.map(lambda value: ("bytes", made.with_header(json.dumps(value).encode()))),
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 50), DAMAGE)
def test_a_file_of_any_bytes_is_a_checkpoint_or_refused(name, which, damage):
    directory, files, _, _ = WHOLE[name]
    target = sorted(files)[which % len(files)]
    how, what = damage
    with tempfile.TemporaryDirectory() as place:
        made.write(Path(place) / directory, {**files, target: files[target][:what] if how == "cut" else what})
        found = Source(place)
        wrong_trackers(found, detect(found.listing))
        for candidate in detect(found.listing):
            with contextlib.suppress(NotWhole):
                facts = TOOLS[candidate.tool].inspect(candidate, found)
                assert facts.step is None or check_step(facts.step) >= 0
                assert all(check_name("metric", metric) for metric in facts.metrics)


@given(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4), max_size=12))
def test_each_file_is_of_one_candidate_at_most(paths):
    listing = Listing("root", {"/".join(path): 1 for path in paths})
    sources = [name for candidate in detect(listing) for name in sorted(candidate.sources)]
    assert len(sources) == len(set(sources))
    assert set(sources) <= listing.files.keys()
