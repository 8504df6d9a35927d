"""Named fault points."""

import pytest

from sgl_rwttt.core import InvalidStateRequest, faults


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.disarm()


def test_nothing_happens_while_nothing_is_armed():
    """Guards: a point that costs or does something in a served process."""
    assert faults._armed is None
    faults.reach("queued", owner="a", branch="b")
    faults.reach("no such point")


def test_an_unknown_point_is_refused_by_name():
    """Guards: a typo that arms nothing, and a test that then proves nothing."""
    with pytest.raises(InvalidStateRequest, match="'quued'"):
        faults.arm("quued", faults.kill)
    assert faults._armed is None


def test_skip_times_and_when_choose_the_visits():
    """Guards: a fault that acts at another visit, or for another owner, than it was armed for."""
    seen = []

    def act(context):
        seen.append(context["visit"])

    fault = faults.arm("mid_tail", act, when=lambda c: c["owner"] == "a", skip=1, times=2)
    for visit, owner in enumerate("abaaba"):
        faults.reach("mid_tail", owner=owner, visit=visit)
    faults.reach("after_commit", owner="a", visit=9)
    assert seen == [2, 3] and fault.hits == 2


def test_a_block_disarms_at_its_end():
    """Guards: a fault that outlives its test."""
    other = faults.arm("queued", lambda c: None, times=None)
    with (
        pytest.raises(RuntimeError, match="here"),
        faults.armed("matched", faults.raising(RuntimeError("here"))),
    ):
        faults.reach("matched")
    faults.reach("matched")
    faults.reach("queued")
    assert other.hits == 1
    faults.disarm(other)
    assert faults._armed is None


def test_not_finite_takes_one_block():
    """Guards: an injected NaN that spoils its neighbours in the group too."""
    torch = pytest.importorskip("torch")
    values = torch.zeros(2, 3, 4, 5)
    faults.not_finite({"values": values, "index": 1})
    assert values[:, 1].isnan().all() and not values[:, [0, 2]].isnan().any()
