"""A write that fails ends its own request with a typed error; nobody else notices."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.served import Served, rid, state
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("llama_embed_proj")
CHUNK = int(CASE.config["ttt_chunk"])
POISON = 77  # a token whose evidence is not finite


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Token 77's embedding is finite, but conv(T) @ proj overflows with it."""
    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copy(CASE.path / "config.json", folder)
    weights = load_file(CASE.path / "model.safetensors")
    table = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[table][POISON] = 3e38
    save_file(weights, folder / "model.safetensors")
    engine = Served(folder)
    yield engine
    engine.close()


def healthy(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 60 for i in range(length)]


NEVER = {"logit_bias": {str(POISON): -100.0}}  # so that nobody generates it


def failure(served: Served, ids: list[int], **options: Any) -> str:
    with pytest.raises(Exception) as caught:
        served.generate(ids, **options)
    return str(getattr(caught.value, "detail", caught.value))


def test_a_failed_prefill_is_typed(served: Served) -> None:
    """Guards: a non-finite candidate published, or an untyped crash of the server."""
    before = served.info()
    poisoned = [*healthy(1, 3), POISON, *healthy(2, 3 * CHUNK)]
    assert "[WriteFailed" in failure(served, poisoned, n=4)
    exact = [*healthy(1, CHUNK - 1), POISON]
    assert "[WriteFailed" in failure(served, exact, n=4)
    after = served.info()
    assert after["integrity_checked"]
    assert after["store"]["owners"] == 0
    assert after["counters"]["failed_writes"] == before["counters"]["failed_writes"] + 2


def test_a_failed_boundary_in_decode_is_typed(served: Served) -> None:
    """Guards: a failed owner run once more in the next step, behind its own row."""
    begun = [*healthy(1, 3), POISON]
    assert "[WriteFailed" in failure(served, begun, n=3 * CHUNK, sampling=NEVER)
    stopped = served.generate(begun, n=CHUNK - 4, sampling=NEVER)
    assert len(stopped["output_ids"]) == CHUNK - 4
    assert served.info()["store"]["owners"] == 0


def test_reading_the_same_tokens_is_fine(served: Served) -> None:
    """Guards: a check that fires on tokens that write nothing."""
    poisoned = [*healthy(1, 3), POISON, *healthy(2, 3 * CHUNK)]
    answer = served.generate(poisoned, n=4, custom={"ttt_mode": "read"})
    assert len(answer["output_ids"]) == 4
    assert state(answer)["version"] == 0
    below = [*healthy(1, 3), POISON]
    assert state(served.generate(below, n=1))["tail"] == 4


def test_a_failed_request_leaves_no_kv(served: Served) -> None:
    """Guards: KV computed with a dropped candidate put into the prefix cache."""
    poisoned = [*healthy(5, 2 * CHUNK), POISON, *healthy(6, 2 * CHUNK)]
    failure(served, poisoned, n=4)
    served.flush()
    good = [*healthy(5, 2 * CHUNK), *healthy(6, 4)]
    cold = served.generate(good, n=6)
    served.flush()
    failure(served, poisoned, n=4)
    warm = served.generate(good, n=6)
    assert warm["output_ids"] == cold["output_ids"]
    assert warm["meta_info"]["cached_tokens"] == 0


def test_others_in_the_batch_do_not_notice(served: Served) -> None:
    """Guards: one owner's infinity in a shared operator reaching its neighbours."""
    goods = [healthy(10 + i, 5 + 3 * i) for i in range(5)]
    alone = []
    for ids in goods:
        served.flush()
        alone.append(served.generate(ids, n=24, sampling=NEVER))
    served.flush()
    bads = [[*healthy(30 + i, i + 1), POISON, *healthy(40 + i, 20)] for i in range(4)]

    async def doomed(ids: list[int]) -> str:
        try:
            await served.agenerate(ids, n=24, delay=0.02 * len(ids))
        except Exception as error:
            return str(getattr(error, "detail", error))
        return "served"

    results = served.run(
        *(served.agenerate(ids, n=24, sampling=NEVER) for ids in goods),
        *(doomed(ids) for ids in bads),
    )
    assert all("[WriteFailed" in text for text in results[5:])
    for together, solo in zip(results[:5], alone, strict=True):
        assert together["output_ids"] == solo["output_ids"]
        assert state(together)["state_id"] == state(solo)["state_id"]
    assert served.info()["integrity_checked"]


def test_the_parent_of_a_failed_branch_goes_on(served: Served) -> None:
    """Guards: a failed child taking its parent's version or tail with it."""
    owner = served.open()
    parent = served.generate(healthy(50, CHUNK + 3), n=0, owner=owner)
    ask = {"n": 12, "owner": owner, "parent": rid(parent), "sampling": NEVER}
    before = served.generate(healthy(51, 2), **ask)
    failure(served, [POISON, *healthy(52, CHUNK)], n=2, owner=owner, parent=rid(parent))
    after = served.generate(healthy(51, 2), **ask)
    assert after["output_ids"] == before["output_ids"]
    assert state(after)["state_id"] == state(before)["state_id"]
    served.control("close", owner=owner)
