"""Planted bugs in users' rights."""

from __future__ import annotations

from typing import Any

from raftkv.apply.auth.directory import Directory
from raftkv.apply.auth.records import User
from raftkv.apply.auth.rights import Rights
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.wire import Caller
from tests.sim.corners import users_corner
from tests.sim.mutants.registry import Patches, mutant, nothing


@mutant("rights looked at where proposed alone", "an entry is checked again when it is applied (A1)", users_corner)
def _proposed_alone(patches: Patches) -> None:
    def check(rights: Rights, kind: int, request: Any, caller: Caller | None) -> None:
        original(rights, kind, request, caller)

    original = patches.set(Rights, "check_in_pieces", nothing)
    patches.set(Rights, "check", check)


@mutant("revision of users not looked at", "what was let in under other users is refused (A1)", users_corner)
def _any_revision(patches: Patches) -> None:
    def user(rights: Rights, caller: Caller | None) -> User | None:
        present = None if caller is None else Caller(caller.user, rights._auth.revision)
        return original(rights, present)

    original = patches.set(Rights, "_user", user)


@mutant("users kept over a snapshot", "a received database has users, too (A2)", users_corner)
def _kept(patches: Patches) -> None:
    def reload(auth: AuthStore) -> None:
        if not auth.directory.users:
            original(auth)

    original = patches.set(AuthStore, "reload", reload)


@mutant(
    "rights of a user kept when its role changes",
    "what is known of a user is forgotten with a change (A1)",
    users_corner,
)
def _stale_rights(patches: Patches) -> None:
    patches.set(Directory, "_forget", nothing)
