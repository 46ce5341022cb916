"""Directories as other tools leave them, made of a few bytes each."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

TABLE_END = bytes.fromhex("57fb808b247547db")


def write(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def torch_file(**numbers: int) -> bytes:
    """What ``torch.save`` writes: an archive of a pickle, in which these numbers are."""
    items = b"".join(
        b"X" + struct.pack("<I", len(name)) + name.encode() + b"q\x01" + b"J" + struct.pack("<i", number)
        for name, number in numbers.items()
    )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        # An info of its own has a fixed time: the same bytes at every call.
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), b"\x80\x02}q\x00(" + items + b"u.")
        archive.writestr(zipfile.ZipInfo("archive/data/0"), bytes(64))
    return data.getvalue()


def safetensors(size: int = 16, **metadata: str) -> bytes:
    header = {"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    return with_header(json.dumps({"__metadata__": metadata, **header} if metadata else header).encode()) + bytes(size)


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def index(shards: Iterable[str]) -> bytes:
    return json.dumps({"weight_map": {f"layer.{n}": shard for n, shard in enumerate(shards)}}).encode()


def metadata(shards: Iterable[str]) -> bytes:
    """The ``.metadata`` of DCP, as far as it is looked at: a pickle with the places of two items in each shard."""
    size = len(torch_file())
    items = [
        b"(Vrelative_path\nV%s\nVoffset\nI%d\nVlength\nI%d\nda" % (name.encode(), offset, size)
        for name in shards
        for offset in (0, size)
    ]
    return b"(l" + b"".join(items) + b"."


def trainer(step: int, **log: float) -> dict[str, bytes]:
    state = {"global_step": step, "epoch": 0.5, "log_history": [{"step": step - 1, "loss": 9.0}, {"step": step, **log}]}
    names = ("optimizer.pt", "scheduler.pt", "training_args.bin")
    return {
        "config.json": b"{}",
        "model.safetensors": safetensors(),
        "rng_state.pth": torch_file(),
        "trainer_state.json": json.dumps(state).encode(),
        **{name: torch_file() for name in names},
    }


def dcp(ranks: int = 2) -> dict[str, bytes]:
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)]
    return {".metadata": metadata(shards), **{name: torch_file() * 2 for name in shards}}


def dcp_per_rank(ranks: int = 2) -> dict[str, bytes]:
    shards = [f"__{rank}_0.distcp" for rank in range(ranks)]
    return {name: torch_file() * 2 for name in shards} | {
        f"__{rank}.metadata": metadata([name]) for rank, name in enumerate(shards)
    }


def deepspeed(ranks: int = 2) -> dict[str, bytes]:
    model = torch_file(dp_world_size=ranks, mp_world_size=1)
    states = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_file() for rank in range(ranks)}
    return {"mp_rank_00_model_states.pt": model, **states}


def megatron(ranks: int = 2) -> dict[str, bytes]:
    return {**dcp(ranks), "common.pt": torch_file(), "metadata.json": b"{}"}


def megatron_ranks(tensor: int = 2, pipeline: int = 2) -> dict[str, bytes]:
    ranks = [(t, p) for t in range(tensor) for p in range(pipeline)]
    return {f"mp_rank_{t:02d}_{p:03d}/model_optim_rng.pt": torch_file() for t, p in ranks}


def orbax(**metrics: float) -> dict[str, bytes]:
    said = {"item_handlers": {"default": "x"}, "metrics": metrics, "commit_timestamp_nsecs": 1}
    tree = dict.fromkeys(("default/_METADATA", "default/manifest.ocdbt", "default/d/0a1b"), b"x")
    return {"_CHECKPOINT_METADATA": json.dumps(said).encode(), **tree}


def tf_variables(prefix: str, shards: int = 2) -> dict[str, bytes]:
    data = {f"{prefix}.data-{number:05d}-of-{shards:05d}": b"x" for number in range(shards)}
    return {f"{prefix}.index": b"x" + TABLE_END, f"{prefix}.meta": b"x", **data}


def saved_model() -> dict[str, bytes]:
    variables = {name: data for name, data in tf_variables("variables/variables", 1).items() if ".meta" not in name}
    return {"saved_model.pb": b"x", "assets/vocabulary": b"x", **variables}


def below(directory: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{directory}/{name}": data for name, data in files.items()}
