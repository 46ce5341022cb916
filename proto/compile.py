"""Compile ``proto/*.proto`` into ``raftkv/pb``: the descriptor set, the module shims and their type stubs.

The types of the stubs for grpcio come from the same descriptors: ``raftkv/grpcio/*.pyi``.

python proto/compile.py           write them
python proto/compile.py --check   write nothing; exit 1 and name the files that are not current
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("raftkv/pb")
GRPCIO = Path("raftkv/grpcio")
SHIM = '''"""Messages of proto/{name}.proto; their types are in {name}_pb2.pyi."""

from raftkv.pb._pool import export

export("{name}", globals())
'''


KINDS = {"services": ("", "grpc.Channel", "Iterator"), "aio": ("Async", "grpc.aio.Channel", "AsyncIterator")}
"""Module of stubs to the beginning of the kinds of its calls, its channel, and what requests may be."""
CALLED = ("rpc", "lock", "election", "health", "admin")
"""Files with the services that clients call."""


def compile_into(root: Path) -> None:
    """Write everything generated below ``root``/raftkv."""
    names = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))
    (root / PACKAGE).mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"-I{PACKAGE}={ROOT / 'proto'}",
        f"-I{_folder_of('google.api')}",
        f"-I{_folder_of('grpc_tools._proto')}",
        f"--descriptor_set_out={root / PACKAGE / 'descriptors.bin'}",
        "--include_imports",
        f"--pyi_out={root}",
        *(f"{PACKAGE}/{name}.proto" for name in names),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(1)
    for name in names:
        (root / PACKAGE / f"{name}_pb2.py").write_text(SHIM.format(name=name))
        _leave_out_annotations(root / PACKAGE / f"{name}_pb2.pyi")
    files = descriptor_pb2.FileDescriptorSet.FromString((root / PACKAGE / "descriptors.bin").read_bytes())
    (root / GRPCIO).mkdir(parents=True, exist_ok=True)
    for name in KINDS:
        (root / GRPCIO / f"{name}.pyi").write_text("\n".join(_stubs(files, *KINDS[name])))


def _stubs(files: descriptor_pb2.FileDescriptorSet, kind: str, channel: str, several: str) -> Iterator[str]:
    """Yield the lines that type the stubs of all services that clients call."""
    home = {f".{file.package}.{one.name}": Path(file.name).stem for file in files.file for one in file.message_type}

    def type_of(name: str) -> str:
        return f"{home[name]}_pb2.{name.rpartition('.')[2]}"

    services = [one for file in files.file if Path(file.name).stem in CALLED for one in file.service]
    used = {home[name] for one in services for method in one.method for name in (method.input_type, method.output_type)}
    iterators = sorted({several, "Iterator"})
    yield f"from collections.abc import {', '.join(iterators)}\n"
    yield "import grpc\nimport grpc.aio\n"
    yield f"from raftkv.grpcio.calls import {kind}Stream, {kind}Unary"
    yield f"from raftkv.pb import {', '.join(f'{name}_pb2' for name in sorted(used))}"
    for one in services:
        yield f"\nclass {one.name}:"
        yield f"    def __init__(self, channel: {channel}) -> None: ..."
        for method in one.method:
            asked, answered = type_of(method.input_type), type_of(method.output_type)
            if method.client_streaming:
                asked = " | ".join(f"{name}[{asked}]" for name in iterators)
            call = "Stream" if method.server_streaming else "Unary"
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()
            yield f"    {name}: {kind}{call}[{asked}, {answered}]"
    yield ""


def _folder_of(package: str) -> Path:
    """The folder from which the files of an installed package are imported, such as ``google/api/http.proto``."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; `pip install -e .[dev]`")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder if package.endswith("_proto") else folder.parents[1]


def _leave_out_annotations(stub: Path) -> None:
    """Only the descriptors carry the paths of HTTP: no type of google.api is used, nor installed beside raftkv."""
    lines = stub.read_text().splitlines(keepends=True)
    stub.write_text("".join(line for line in lines if not line.startswith("from google.api import ")))


def stale_files() -> list[str]:
    """Names of generated files that differ from what the compiler makes of ``proto/`` now."""
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        made = [*(Path(folder) / PACKAGE).iterdir(), *(Path(folder) / GRPCIO).iterdir()]
        fresh = {path.name: path.read_bytes() for path in made}
    found = [*(ROOT / PACKAGE).glob("*_pb2.py*"), *(ROOT / GRPCIO).glob("*.pyi"), ROOT / PACKAGE / "descriptors.bin"]
    current = {path.name: path.read_bytes() for path in found}
    return sorted(name for name in fresh.keys() | current.keys() if fresh.get(name) != current.get(name))


def main() -> None:
    """Compile, or check with ``--check``."""
    if "--check" not in sys.argv[1:]:
        compile_into(ROOT)
        return
    stale = stale_files()
    if stale:
        raise SystemExit(f"not current, run `make proto`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
