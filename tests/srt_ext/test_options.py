"""Options, refusals and request parameters: bad input is named and changes nothing."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.backends.in_place import InPlaceConfig
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.lang.engine import _publish_options
from sgl_rwttt.srt_ext import refusals
from sgl_rwttt.srt_ext.launch import fresh_environment
from sgl_rwttt.srt_ext.options import ENV_OPTIONS, TTTOptions, add_arguments, publish_arguments
from sgl_rwttt.srt_ext.params import parse_params
from sgl_rwttt.srt_ext.refusals import RefusedFlag, refuse_unsupported
from sgl_rwttt.srt_ext.rules import fold_pages, size_pools

CONFIG = InPlaceConfig((24, 25, 26), 32, 1e-3, True, "input_embed", 576, 1536)


@pytest.mark.parametrize(
    "values, named",
    [
        ({"ttt_memory_mb": 0}, "--ttt-memory-mb"),
        ({"ttt_dense_fraction": 1.0}, "--ttt-dense-fraction"),
        ({"ttt_fold_rows": -1}, "--ttt-fold-rows"),
        ({"ttt_colour": 1}, "ttt_colour"),
    ],
)
def test_bad_options_are_named(values: dict[str, Any], named: str) -> None:
    """Guards: a size that fails deep in an allocation, or a typo that is ignored."""
    with pytest.raises(ValueError, match=named):
        TTTOptions.from_mapping(values)


def test_flags_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a flag accepted on the command line and lost on the way to the scheduler."""
    monkeypatch.delenv(ENV_OPTIONS, raising=False)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    publish_arguments(parser.parse_args([]))
    assert TTTOptions.from_env() == TTTOptions()
    publish_arguments(parser.parse_args(["--ttt-memory-mb", "7", "--ttt-fold-rows", "0"]))
    assert TTTOptions.from_env() == TTTOptions(memory_mb=7, fold_rows=0)
    publish_arguments(parser.parse_args(["--snapshot-dir", "a"]))
    assert TTTOptions.from_env() == TTTOptions(snapshot_dir="a")


def test_options_of_an_earlier_server_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a second engine of this process, or a server it starts, in the first one's mode."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for publish in (
        lambda: publish_arguments(parser.parse_args([])),
        lambda: _publish_options({"model_path": "x"}),
    ):
        monkeypatch.setenv(ENV_OPTIONS, '{"mode": "serial", "max_owners": 1}')
        assert ENV_OPTIONS not in fresh_environment()
        publish()
        assert TTTOptions.from_env() == TTTOptions()


@pytest.mark.parametrize("memory_mb", [16, 64, 2048])
@pytest.mark.parametrize("fold_rows", [None, 0, 100])
def test_pools_fit_the_memory(memory_mb: int, fold_rows: int | None) -> None:
    """Guards: pools larger than the flag says."""
    pages, bases = size_pools(CONFIG, TTTOptions(memory_mb, 0.25, fold_rows))
    page, base = 4 * 3 * 32 * (1536 + 576), 4 * 3 * 1536 * 576
    assert (pages - 1) * page + (bases - 1) * base <= memory_mb << 20
    assert (pages + 1) * page + (bases - 1) * base > memory_mb << 20
    if fold_rows == 0:
        assert bases == 1


def test_pools_too_small_are_refused() -> None:
    """Guards: a server that starts and can hold nobody."""
    with pytest.raises(ValueError, match=r"--ttt-memory-mb=2 .*at least 4"):
        size_pools(CONFIG, TTTOptions(2, 0.0))


def test_fold_rows_round_up_to_pages() -> None:
    """Guards: a crossover in rows read as pages."""
    assert fold_pages(CONFIG, TTTOptions(fold_rows=None), 14) == 14
    assert fold_pages(CONFIG, TTTOptions(fold_rows=33), 14) == 2
    assert fold_pages(CONFIG, TTTOptions(fold_rows=0), 14) == 0


def supported() -> dict[str, Any]:
    return {field: allowed[0] for field, allowed, _why in refusals._REFUSED}


def test_the_supported_configuration_passes() -> None:
    """Guards: refusing what is verified."""
    refuse_unsupported(SimpleNamespace(**supported()))


@pytest.mark.parametrize("field", sorted(supported()))
def test_each_refusal_names_its_flag(field: str) -> None:
    """Guards: a combination that would corrupt states silently."""
    config = SimpleNamespace(**{**supported(), field: "something else"})
    with pytest.raises(RefusedFlag, match="--" + field.replace("_", "-")):
        refuse_unsupported(config)


@pytest.mark.parametrize(
    "custom, named",
    [
        ({"ttt_mod": "read"}, "ttt_mod"),
        ({"ttt_mode": "frozen"}, "ttt_mode"),
        ({"ttt_mode": 1}, "ttt_mode"),
        ({"ttt_root": "zz" * 16}, "ttt_root"),
        ({"ttt_root": "00"}, "ttt_root"),
        ({"ttt_expect": ""}, "ttt_expect"),
        ({"ttt_pin": ""}, "ttt_pin"),
        ({"ttt_pin": "x" * 129}, "ttt_pin"),
        ({"ttt_clear": "keep"}, "ttt_clear"),
    ],
)
def test_bad_request_keys_are_named(custom: dict[str, Any], named: str) -> None:
    """Guards: an unknown or misspelt key that silently means the default."""
    with pytest.raises(InvalidStateRequest, match=named):
        parse_params(custom)


def test_request_keys() -> None:
    """Guards: another client's custom_params refused, or ours not read."""
    assert parse_params(None).mode is Effect.WRITE
    params = parse_params({"theirs": 1, "ttt_mode": "read", "ttt_expect": "0a" * 16})
    assert params.mode is Effect.READ
    assert params.expect == b"\x0a" * 16
