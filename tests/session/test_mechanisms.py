"""What `verify` says it held to the truth did happen: it counts, lowers what comes late, and says what never was."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from armillary import Choice
from armillary.cli.names import find, small
from armillary.cli.verify import code_of
from armillary.exchanges import low_rank as low_rank_file
from armillary.planning.request import PlanRequest
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from contracts.journey import of_few_tensors


def verify_by(rank, workers, exchange, steps=5, workload="", plant=None):
    torch.set_num_threads(1)
    request = JobRequest(PlanRequest(constraints={"*": Choice.parse(exchange)} if exchange else {}))
    with plant() if plant else nullcontext():
        task = find(workload, small(workload)) if workload else of_few_tensors()
        return verify_workload(task, steps=steps, exchanges=(), request=request)


def times_of(found, plan="planned"):
    return {one.mechanism: one.times for one in found.acted if one.plan == plan}


WAITING = {  # as a user would name them; nothing of it would happen in five steps
    "threshold": ({"thresholds refreshed", "thresholds kept", "residuals sent"}, "to threshold(lifespan=3, small=8)"),
    "low_rank(rank=2)": (
        {"exchanges sent whole at the start", "factors orthonormalised", "residuals sent"},
        "low_rank(rank=2) to low_rank(rank=2, start=2)",
    ),
}


@pytest.mark.parametrize("text", WAITING)
def test_what_an_exchange_puts_off_is_lowered_and_all_of_it_happens_twice(crew, text):
    mechanisms, lowered = WAITING[text]
    found, *others = crew(3).run(verify_by, text)
    assert others == [found] * 2 and found.is_equal and not found.idle, str(found)
    assert "NOT exact, held to its own oracle" in str(found)
    times = times_of(found)
    assert times.keys() == mechanisms and min(times.values()) >= 2
    assert len(found.lowered) == 1 and lowered in found.lowered[0] and found.lowered[0] in str(found)


def test_it_trains_on_until_all_has_happened_twice(crew):
    found = crew(2).run(verify_by, "threshold(small=0)", 2)[0]  # thresholds are kept in the fifth step first
    assert found.steps == 5 and times_of(found)["thresholds kept"] >= 2 and found.is_equal


def test_rows_that_are_looked_up_are_counted(crew):
    found = crew(2).run(verify_by, "", 2, "recommender")[0]
    assert {"exchanges", "rows looked up", "rows with gradients"} >= times_of(found).keys() and not found.idle


def test_a_code_that_is_never_made_is_not_called_verified(crew):
    """One worker sends nothing, so nothing is coded."""
    (found,) = crew(1).run(verify_by, "quantize(bits=8)")
    assert found.is_equal and {one.mechanism for one in found.idle} == set(times_of(found))
    assert "NOT exercised: quantize(bits=8): exchanges coded: never on 1 workers in 20 steps" in str(found)
    assert code_of(found) == 1 and code_of(replace(found, acted=())) == 0


def test_a_matrix_that_is_too_small_for_its_rank_is_not_called_verified(crew):
    found = crew(2).run(verify_by, "low_rank(rank=64)")[0]
    assert "factors orthonormalised" in [one.mechanism for one in found.idle]


@contextmanager
def residuals_dropped():
    """By the runtime, and by an oracle that forgets them too."""
    was_kept, was_oracle = low_rank_file.kept_back, low_rank_file._Way.oracle

    def forgetful(self, parcels, states):
        results, after = was_oracle(self, parcels, states)
        return results, [{**state, "residual": 0 * state["residual"]} for state in after]

    low_rank_file.kept_back, low_rank_file._Way.oracle = lambda parcel, lost: torch.zeros_like(lost), forgetful
    yield
    low_rank_file.kept_back, low_rank_file._Way.oracle = was_kept, was_oracle


def test_a_fault_in_runtime_and_oracle_alike_shows_in_the_count(crew):
    found = crew(2).run(verify_by, "low_rank(rank=1)", 5, "", residuals_dropped)[0]
    assert found.is_equal and [one.mechanism for one in found.idle] == ["residuals sent"]
