"""From words, environment and file to a ``ServerConfig``, by etcd's rules.

Owns the order of precedence: with ``--config-file`` the file alone counts; otherwise flags, then ``ETCD_*``, and the
same setting given both ways is refused. ``Options.warnings`` has a line for each setting that has no effect.

    options = read_options(["--name=a", "-data-dir", "/tmp/a"], os.environ)
    options.config.name

Flags are those of ``server.flags``, with one dash or two, ``--flag=value`` or ``--flag value``; booleans take a
value only after ``=``; the first word that is no flag is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.pflag import did_you_mean
from raftkv.cli.program import BAD_FLAGS, ERROR, CommandError
from raftkv.cli.server.flags import ALL_ALPHA, BOOLEANS, FLAGS, GATE_FIELDS, IDLE, REFUSED, boolean, duration
from raftkv.config import FEATURES, LogRotation, ServerConfig, TLSFiles, Tracing
from raftkv.errors import ConfigError
from raftkv.server.insecure_settings import hardened, list_insecure_settings, refusal

_ROTATION_FIELDS: Final = {field.name: type(field.default) for field in dataclasses.fields(LogRotation)}
_GO_NAMES: Final = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}


_WHOLE: Final = re.compile("-?[0-9]{1,12}")


class _Number(str):
    """A number as it was written."""


def read_rotation(text: str) -> LogRotation:
    """Return the settings of ``--log-rotation-config-json``, lumberjack's as JSON; refused in the words of etcd and Go.

    Names count in any case, and unknown ones are ignored, as in Go.

    Arguments:
        text: of the flag, such as ``{"maxsize": 10, "maxbackups": 3}``.

    Raises:
        ConfigError: they cannot be read.
    """
    _check_syntax(text.encode())
    # Numbers stay texts, so that the refusal of a fraction shows it as it was written.
    document = json.loads(text, parse_int=_Number, parse_float=_Number)
    if document is None:
        return LogRotation()
    if not isinstance(document, dict):
        raise ConfigError(
            f"invalid log rotation config: json: cannot unmarshal {_go_name(document)} into Go value of type "
            "embed.logRotationConfig"
        )
    found: dict[str, Any] = {}
    for name, value in document.items():
        kind = _ROTATION_FIELDS.get(name.lower())
        if kind is not None and value is not None:
            found[name.lower()] = _rotation_value(name.lower(), kind, value)
    return LogRotation(**found)


def _check_syntax(data: bytes) -> None:
    from raftkv.server.gateway.syntax import CutError, JsonError, quoted, scan, skip_space

    try:
        for _ in scan(data, skip_space(data, 0)):
            pass
    except JsonError as error:
        fault = "unexpected end of JSON input" if isinstance(error, CutError) else error
        raise ConfigError(f"improperly formatted log rotation config: {fault}") from None
    try:
        json.loads(data, parse_int=_Number)
    except json.JSONDecodeError as error:
        text = f"invalid character {quoted(data[error.pos])} after top-level value"
        raise ConfigError(f"improperly formatted log rotation config: {text}") from None
    except RecursionError:
        raise ConfigError("improperly formatted log rotation config: exceeded max depth") from None


def _rotation_value(name: str, kind: type, value: Any) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, _Number) and _WHOLE.fullmatch(value):
        if value.startswith("-"):
            raise ConfigError(f"--log-rotation-config-json: {name} must not be negative (set to {value})")
        return int(value)
    shown = f"{_go_name(value)} {value}" if kind is int and isinstance(value, _Number) else _go_name(value)
    raise ConfigError(
        f"invalid log rotation config: json: cannot unmarshal {shown} into Go struct field "
        f"logRotationConfig.{name} of type {kind.__name__}"
    )


def _go_name(value: Any) -> str:
    return "number" if isinstance(value, _Number) else _GO_NAMES[type(value)]


ENVIRONMENT_PREFIX = "ETCD_"
# Read by etcd itself or set by its packages; no flags.
_OTHER_ENVIRONMENT = {"ETCD_UNSUPPORTED_ARCH", "ETCD_VERSION", "ETCD_CONFIG_FILE"}
_PARTS: dict[str, Callable[..., Any]] = {"client_tls": TLSFiles, "peer_tls": TLSFiles, "tracing": Tracing}
"""Fields of the configuration that are values of several settings."""
_DEPTH_MAX: Final = 64
"""Levels of a configuration file; settings need two."""

_SECTIONS = {
    "client-transport-security": "",
    "peer-transport-security": "peer-",
    "socket-options": "socket-",
    "discovery-config": "discovery-",
}
"""Settings of a file that have settings of their own, and how the flags of these begin."""
_NAMES_OF_SECTIONS: Final = {
    ("", "allowed-cn"): "client-cert-allowed-cn",
    ("", "allowed-hostname"): "client-cert-allowed-hostname",
    ("peer-", "allowed-cn"): "peer-cert-allowed-cn",
    ("peer-", "allowed-hostname"): "peer-cert-allowed-hostname",
}
"""Settings of sections whose flags have other names."""


_EMPTY_IS_DEFAULT: Final = frozenset(
    {"auto-compaction-mode", "auto-compaction-retention", "initial-cluster-state", "log-level"}
)
"""Settings of a file that may be given as an empty text."""

_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
"""Numbers of YAML 1.2: PyYAML takes ``1e4`` for a text."""


@dataclass
class Options:
    """The configuration, and the warnings about it."""

    config: ServerConfig
    warnings: list[str] = field(default_factory=list)
    help: bool = False
    version: bool = False


Complete = Callable[[dict[str, str]], None]
"""Adds the text of flags that are not given."""


def read_options(
    words: Sequence[str], environment: Mapping[str, str], complete: Complete = lambda texts: None
) -> Options:
    """Read everything that configures a member.

    Arguments:
        words: the command line after the program's name.
        environment: the process environment.
        complete: adds the text of flags that are not given; it gets those that are.

    Raises:
        CommandError: one line for the user; code 2 for a flag that cannot be read, else 1.
    """
    given = _read_words(words)
    if given.keys() & {"help", "h"}:
        return Options(ServerConfig(), help=True)
    if pflag.parse_bool(given.pop("version", "false")):
        return Options(ServerConfig(), version=True)
    warnings: list[str] = []
    path = given.pop("config-file", "") or environment.get("ETCD_CONFIG_FILE", "")
    try:
        if path:
            texts = _read_file(path, warnings)
        else:
            texts = {**_read_environment(environment, given, warnings), **given}
        complete(texts)
        values = _convert(texts, warnings, from_file=bool(path))
        _apply_own_certificates(values, warnings)
        config = _make_config(values, warnings, from_file=bool(path))
        if config.secure:
            config = hardened(config)
            if open_to_strangers := list_insecure_settings(config):
                raise ConfigError(refusal(open_to_strangers))
    except ConfigError as error:
        raise CommandError(str(error), ERROR) from None
    if config.quota_is_large:
        warnings.append("--quota-backend-bytes is above the recommended maximum of 8 GiB")
    return Options(config, warnings)


def _read_words(words: Sequence[str]) -> dict[str, str]:
    """Flag name to text; the last of several counts."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            raise CommandError(f"'{word}' is not a valid flag", ERROR)
        name, separator, value = word[2 if word.startswith("--") else 1 :].partition("=")
        if not name or name.startswith("-"):
            raise CommandError(f"bad flag syntax: {word}", BAD_FLAGS)
        if name not in FLAGS and name not in ("version", "help", "h", "config-file"):
            raise CommandError(f"flag provided but not defined: -{name}" + did_you_mean(name, FLAGS, "--"), BAD_FLAGS)
        if not separator:
            if name in BOOLEANS:
                value = "true"
            elif not rest:
                raise CommandError(f"flag needs an argument: -{name}", BAD_FLAGS)
            else:
                value = rest.pop(0)
        given[name] = value
        _parse_flag(name, value)
    if rest:
        raise CommandError(f"'{rest[0]}' is not a valid flag", ERROR)
    return given


def _parse_flag(name: str, text: str) -> Any:
    """Return the value of a flag on the command line; here a bad one ends the command with code 2."""
    flag = FLAGS.get(name)
    try:
        return flag.parse(text) if flag else boolean(text) if name == "version" else text
    except (ValueError, ConfigError) as error:
        kind = "boolean value" if name in BOOLEANS else "value"
        where = f"-{name}" if kind == "boolean value" else f"flag -{name}"
        raise CommandError(f"invalid {kind} {pflag.quote(text)} for {where}: {error}", BAD_FLAGS) from None


def _read_environment(environment: Mapping[str, str], given: Mapping[str, str], warnings: list[str]) -> dict[str, str]:
    names = {ENVIRONMENT_PREFIX + name.upper().replace("-", "_"): name for name in FLAGS}
    found: dict[str, str] = {}
    for key, text in sorted(environment.items()):
        if not key.startswith(ENVIRONMENT_PREFIX) or key in _OTHER_ENVIRONMENT:
            continue
        name = names.get(key)
        if name is None:
            warnings.append(f"unrecognized environment variable {key}={text}")
        elif name in given:
            raise ConfigError(
                f"conflicting environment variable {key} is shadowed by corresponding command-line flag "
                "(either unset environment variable or disable flag)"
            )
        elif text:
            _parse_environment(key, name, text)
            found[name] = text
    return found


def _parse_environment(key: str, name: str, text: str) -> None:
    try:
        FLAGS[name].parse(text)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"invalid value {pflag.quote(text)} for {key}: {error}") from None


def _read_file(path: str, warnings: list[str]) -> dict[str, str]:
    document = _read_document(path)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected settings as 'name: value'")
    texts: dict[str, str] = {}
    for key, value in document.items():
        for name, item in _file_entry(path, str(key), value):
            if item is None or (item == "" and name in _EMPTY_IS_DEFAULT):
                continue
            if name in FLAGS:
                texts[name] = _file_text(path, name, item)
            else:
                warnings.append(f"{path}: unknown setting {name!r} is ignored")
    return texts


def _read_document(path: str) -> Any:
    """Return what a file of YAML holds, or one of JSON."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"open {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    if "\t" in text:
        # JSON may have tabs between its tokens. PyYAML refuses tabs; the parser of etcd accepts them.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    try:
        _check_depth(text)

        class Loader(yaml.SafeLoader):
            """Takes for numbers what etcd does."""

        Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
        return Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    # PyYAML raises these for impossible dates and numbers, and for deep nesting.
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read as YAML: {type(error).__name__}: {error}") from None


def _check_depth(text: str) -> None:
    """Refuse deep nesting: PyYAML reads it in time that grows with the square of its depth."""
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH_MAX:
            raise ValueError(f"more than {_DEPTH_MAX} levels")


def _file_entry(path: str, key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the flags that an entry of the file sets: a section of certificates sets several.

    Raises:
        ConfigError: a section has a plain value. Ignoring it would leave a port open that its user thinks closed.
    """
    prefix = _SECTIONS.get(key)
    if prefix is None:
        return [(key, value)]
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} has settings of its own, as 'name: value' below it; it is given {value!r}")
    return [(_NAMES_OF_SECTIONS.get((prefix, str(name)), prefix + str(name)), item) for name, item in value.items()]


def _file_text(path: str, name: str, value: Any) -> str:
    """Return a value of the file as the text of the flag, checked."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list):
        text = ",".join(map(str, value))
    elif isinstance(value, dict):
        raise ConfigError(
            f"{path}: {name} takes a value, and is given settings of its own: {', '.join(map(str, value))}"
        )
    else:
        # etcd turns YAML into JSON first: a float that is an integer is that integer.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        text = str(value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{path}: {name} has what no name of a file can have: {text!r}")
    # In etcd's files a bare number for a duration means nanoseconds.
    if isinstance(value, int) and FLAGS[name].parse is duration:
        text += "ns"
    try:
        FLAGS[name].parse(text)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: invalid value {pflag.quote(text)} for {name}: {error}") from None
    return text


def _convert(texts: Mapping[str, str], warnings: list[str], *, from_file: bool) -> dict[str, Any]:
    """Return field path to value for the settings; warn of the other flags, or refuse them."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        flag = FLAGS[name]
        value = flag.parse(text)
        dashes = "" if from_file else "--"
        if flag.fate == IDLE:
            if value not in flag.allowed:
                warnings.append(f"{dashes}{name} has no effect in raftkv")
        elif flag.fate == REFUSED:
            if value not in flag.allowed:
                raise ConfigError(f"{dashes}{name} is not implemented in raftkv")
        else:
            values[flag.field] = value
    return values


def _make_config(values: dict[str, Any], warnings: list[str], *, from_file: bool) -> ServerConfig:
    _apply_retention(values)
    _apply_gates(values, warnings)
    text = values.pop("log_rotation_json", "{}")
    values["log_rotation"] = read_rotation(text) if values.get("log_rotation") else None
    parts: dict[str, Any] = {
        kind: made(**{key.split(".")[1]: values.pop(key) for key in list(values) if key.startswith(f"{kind}.")})
        for kind, made in _PARTS.items()
    }
    default = ServerConfig()
    if "listen_client_urls" in values and not from_file:
        values.setdefault("advertise_client_urls", ())
    values["tls_min_version"] = values.get("tls_min_version") or default.tls_min_version
    name = values.get("name", default.name)
    values["data_dir"] = values.get("data_dir") or f"{name}.etcd"
    if values.get("initial_cluster", default.initial_cluster) == default.initial_cluster and name != default.name:
        advertised = values.get("initial_advertise_peer_urls", default.initial_advertise_peer_urls)
        values["initial_cluster"] = ",".join(f"{name}={url}" for url in advertised)
    return replace(default, **values, **parts)


def _apply_own_certificates(values: dict[str, Any], warnings: list[str]) -> None:
    """Prefer a given certificate over a self-signed one, as etcd does."""
    for kind, flag in (("client_tls", "auto-tls"), ("peer_tls", "peer-auto-tls")):
        if values.get(f"{kind}.self_signed") and values.get(f"{kind}.cert_file"):
            del values[f"{kind}.self_signed"]
            warnings.append(f"--{flag} is ignored: a certificate is given")


def _apply_gates(values: dict[str, Any], warnings: list[str]) -> None:
    """Apply ``feature-gates``, unless a flag of an older version sets the same field; say which have no effect.

    Raises:
        ConfigError: both are given.
    """
    gates: dict[str, bool] = values.pop("feature_gates", {})
    if ALL_ALPHA in gates:
        gates = {**dict.fromkeys(GATE_FIELDS, gates.pop(ALL_ALPHA)), **gates}
    for gate, is_on in gates.items():
        if gate not in GATE_FIELDS:
            if is_on != FEATURES.get(gate, (False, ""))[0]:
                warnings.append(f"feature gate {gate} has no effect in raftkv")
            continue
        field_name = GATE_FIELDS[gate]
        if field_name in values:
            flag = next(name for name, flag in FLAGS.items() if flag.field == field_name)
            raise ConfigError(
                f"cannot specify both flags: --{flag}={str(values[field_name]).lower()} and "
                f"--feature-gates={gate}={str(is_on).lower()} at the same time, "
                f"please just use --feature-gates={gate}={str(is_on).lower()}"
            )
        values[field_name] = is_on


def _apply_retention(values: dict[str, Any]) -> None:
    """Read ``auto-compaction-retention`` as revisions, hours or a duration, by the mode."""
    text = values.pop("auto_compaction_retention", "0")
    if text.isascii() and text.isdigit():
        number = int(text)
        if values.get("auto_compaction_mode") == "revision":
            values["auto_compaction_retention_revisions"] = number
        else:
            values["auto_compaction_retention_s"] = number * 3600.0
        return
    try:
        values["auto_compaction_retention_s"] = pflag.parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"error parsing CompactionRetention: {error}") from None
    if values.get("auto_compaction_mode") == "revision":
        raise ConfigError(f"--auto-compaction-retention must be a number of revisions (set to {text})")
