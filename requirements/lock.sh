#!/bin/sh
# Writes the locks: every package that CI and containers install, at one version, with the SHA-256 of each of its files.
#
#   runtime.lock   raftkv and its extras `backup`, `checkpoint` and `dns`: what a container installs
#   ci.lock        the same versions, and what tests and static checks need
#   build.lock     what builds a wheel of raftkv, where nothing may be installed without a hash: in a container
#   native.lock    what compiles its hot path besides: runtime.lock without the extras, and the compiler
#   oldest.lock    the oldest protobuf that is supported, for the tests that use it
#   foreign/       other people's clients, at the versions of tests/foreign/packages
#
# Needs uv (`pip install uv`). What is locked stays, unless its requirement has changed; `make lock UPGRADE=--upgrade` takes
# the newest of all. The locks hold for Python from 3.11 on and every platform; all of runtime.lock has wheels for Linux on
# x86-64 and arm64, Python 3.11 to 3.13. No index is named in them.
set -eu
cd "$(dirname "$0")/.."
compile() {
  uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
    --no-emit-find-links --custom-compile-command 'make lock' "$@"
}
compile ${UPGRADE:-} setup.py --extra backup --extra checkpoint --extra dns -o requirements/runtime.lock
compile ${UPGRADE:-} setup.py --extra dev requirements/ci.in -c requirements/runtime.lock -o requirements/ci.lock
echo setuptools | compile - -c requirements/ci.lock -o requirements/build.lock
compile setup.py --extra native -c requirements/ci.lock -o requirements/native.lock
packages=tests/foreign/packages
for name in aetcd etcd3 etcd3gw etcd_client node patroni; do
  compile $packages/$name.txt -o requirements/foreign/$name.lock
done
for name in jax kubernetes nvrx s3 torchft trainers; do  # they borrow what is missing in their lists
  compile --no-deps $packages/$name.txt -o requirements/foreign/$name.lock
done
echo 'protobuf==4.25.*' | compile ${UPGRADE:-} - -o requirements/oldest.lock
