"""Messages between two ranks: recorded, counted, compared in debug mode; nests of tensors and their forms as text."""

import collections
import pickle
import time

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from armillary.plans import Receive, Send
from armillary.schedules import StageMessage
from armillary.transport.groups import Timeouts
from armillary.transport.point_to_point import Form, Mailbox, form_of
from armillary.transport.transport import Transport
from channels import Board, ThreadChannel, in_threads

Pair = collections.namedtuple("Pair", "left right")

NESTS = [
    torch.zeros(2, 3),
    {
        "skip": torch.zeros(2, requires_grad=True),
        "body": (torch.ones(1, dtype=torch.int64) > 0, 3, None, True, "a", 0.1),
    },
    [torch.zeros(()), [torch.zeros(0, 4, dtype=torch.bfloat16)], {5: ()}],
    (Pair(torch.zeros(1), {"x": [torch.ones(2)]}), float("inf")),
    collections.OrderedDict(b=torch.zeros(1), a=torch.zeros(2)),
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_a_form_survives_being_written_as_text(nest):
    form = form_of(*tree_flatten(nest))
    back = Form.from_json(form.to_json())
    assert back == form
    numbers = range(len(form.leaves))
    assert tree_unflatten(numbers, back.spec) == tree_unflatten(numbers, form.spec)
    assert type(tree_unflatten(numbers, back.spec)) is type(nest if not isinstance(nest, torch.Tensor) else 0)


def test_what_text_cannot_say_is_refused_by_name():
    with pytest.raises(TypeError, match="a set cannot cross from one process to another; want tensors, numbers, text"):
        form_of(*tree_flatten((torch.zeros(1), {1, 2}))).to_json()
    with pytest.raises(RuntimeError, match=r"sent a named tuple no\.where\.Thing, which is none here"):
        Form.from_json('{"leaves": [{"is": 1}], "nest": {"module": "no.where", "class": "Thing", "parts": [0]}}')
    with pytest.raises(RuntimeError, match=r"named tuple os\.system, which is none here"):
        Form.from_json('{"leaves": [{"is": 1}], "nest": {"module": "os", "class": "system", "parts": [0]}}')


def messages(what, count):
    return [StageMessage(what, step, 0, 0) for step in range(count)]


@pytest.mark.parametrize("rule", ["nccl", "gloo"])
def test_messages_of_several_edges_share_one_order_and_are_taken_in_any(rule, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("something was unpickled"))
    cpu, ups, norms = torch.device("cpu"), messages("activation", 3), messages("partial norm", 3)

    def job(rank, channel):
        """Every message of an edge has one form."""
        box, found = Mailbox(channel, cpu, one_queue=rule == "nccl"), []
        for up, norm in zip(ups, norms):
            for one in (up, norm):
                if rank == 0:
                    box.send(one, 1, *tree_flatten({"at": torch.full((1 + len(one.what) % 2,), one.step)}))
                else:
                    box.expect(one, 0)
        if rank == 0:
            for one in (*ups, *norms):
                box.over(one)
            return found
        for one in (*reversed(norms[1:]), *ups, norms[0]):
            found.append((one.step, tree_unflatten(*box.take(one))["at"][0].item()))
        return found

    found = in_threads(2, job, rule)[1]
    assert found == [(step, step) for step in (2, 1, 0, 1, 2, 0)]


def test_two_that_send_first_hang_under_nccls_rule_and_a_swapped_pair_is_seen():
    board = Board("nccl", timeout_seconds=0.1)
    one, other = ThreadChannel(board, 0), ThreadChannel(board, 1)
    held = [
        one.post(Send("a", 1, torch.zeros(1))),
        other.post(Send("b", 0, torch.zeros(1))),
        one.post(Receive("b", 1, torch.zeros(1))),
        other.post(Receive("a", 0, torch.zeros(1))),
    ]
    with pytest.raises(AssertionError, match="a, : never received"):
        held[0].wait()
    board = Board()
    ThreadChannel(board, 0).post(Send("a", 1, torch.zeros(1)))
    with pytest.raises(AssertionError, match="a,  meets b, "):
        ThreadChannel(board, 1).post(Receive("b", 0, torch.zeros(1)))


def talk(rank, world, check_order):
    """Three messages each way, the last of another size; what was recorded and what arrived."""
    transport = Transport(check_order=check_order)
    transport.recording = True
    sizes, got = (2, 2, 5), []
    rooms = [torch.full((size,), -1.0) for size in sizes]
    waits = [transport.post(Receive("room", 1 - rank, room, at=f"step {step}")) for step, room in enumerate(rooms)]
    waits += [
        transport.post(Send("room", 1 - rank, torch.full((size,), rank + 10.0 * step), at=f"step {step}"))
        for step, size in enumerate(sizes)
    ]
    for wait in waits:
        wait.wait()
    records = [(record.group, record.action, record.sent_bytes) for record in transport.take_records()]
    got = [room.tolist() for room in rooms]
    transport.close()
    return got, records


@pytest.mark.parametrize("check_order", [False, True])
def test_messages_arrive_in_order_and_are_recorded_with_their_bytes(crew, check_order):
    for rank, (got, records) in enumerate(crew(2).run(talk, check_order)):
        assert got == [[1 - rank + 10.0 * step] * size for step, size in enumerate((2, 2, 5))]
        assert sorted(records) == sorted(
            [("room", "Receive", 0.0)] * 3 + [("room", "Send", 4.0 * n) for n in (2, 2, 5)]
        )


def profiled(rank, world):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        talk(rank, world, False)
    return {event.key for event in seen.key_averages() if event.key.startswith("armillary::room")}


def test_the_profiler_shows_messages_by_name(crew):
    names = {"armillary::room.Send", "armillary::room.Receive", "armillary::room.wait"}
    assert crew(2).run(profiled) == [names, names]


def differ(rank, world, fault):
    """Rank 0 sends what rank 1 does not expect."""
    transport = Transport(check_order=True)
    one, two = torch.zeros(3), torch.zeros(2, 2)
    if rank == 0:
        order = [Send("activation", 1, one, at="step 0"), Send("norm", 1, two)]
        posted = reversed(order) if fault == "swapped" else [order[0], Send("norm", 1, two.double())]
        held = [transport.post(message) for message in posted]  # gloo forgets a message that nobody holds
        transport.barrier()
        transport.give_up()
        return "" if held else "nothing was sent"
    waits = [transport.post(Receive("activation", 0, one, at="step 0")), transport.post(Receive("norm", 0, two))]
    with pytest.raises(RuntimeError) as caught:
        waits[1].wait()
    transport.barrier()
    transport.give_up()
    return str(caught.value)


def test_check_order_names_both_ranks_and_both_messages(crew):
    first = "messages out of order: rank 0 sends"
    assert crew(2).run(differ, "swapped")[1] == (
        f"{first} #1 norm, float32 (2, 2), rank 1 wants #1 activation (step 0), float32 (3,) from it"
    )
    assert crew(2).run(differ, "dtype")[1] == (
        f"{first} #2 norm, float64 (2, 2), rank 1 wants #2 norm, float32 (2, 2) from it"
    )


def leave(rank, world):
    transport = Transport(timeouts=Timeouts(None, 1.0))
    if rank == 1:
        time.sleep(1.5)
        return ""
    wait = transport.post(Receive("activation of stage 1", 1, torch.zeros(3)))
    with pytest.raises(RuntimeError) as caught:
        wait.wait()
    return str(caught.value)


def test_a_message_that_does_not_come_is_an_error_that_names_it(crew):
    error = crew(2).run(leave)[0]
    assert error.startswith("rank 0: activation of stage 1 from rank 1, step 0: its peers did not come within timeout")
