"""torch.distributed answers every request as lockstep does, and counts the same bytes."""

import os
import time

import pytest
import torch
from torch import distributed as dist

from armillary.plans import AllGather, AllReduce, AllToAll, members
from armillary.reference import lockstep
from armillary.transport.groups import Timeouts
from armillary.transport.requests import AskedRequest, disagreement
from armillary.transport.transport import Transport
from forked import forkserver

WORLD, PER_NODE = 4, 2
KINDS = ["all_reduce", "all_gather", "all_to_all", "all_to_all, all empty", "all_to_all, one rank sends nothing"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64]


def scatter(rank, dtype, rows, form):
    """Small whole numbers, exact in every dtype; "columns" is not contiguous, "transposed" neither."""
    values = torch.arange(rows * 6).remainder(7).add(rank).to(dtype).view(rows, 6)
    return {"plain": values, "columns": values[:, ::2], "transposed": values.reshape(6, rows).T, "flat": values[:, 0]}[
        form
    ]


def request_of(rank, kind, dtype, form, scope):
    ranks = next(ranks for ranks in members(scope, WORLD, PER_NODE) if rank in ranks)
    place, count = ranks.index(rank), len(ranks)
    if not kind.startswith("all_to_all"):
        return (AllReduce if kind == "all_reduce" else AllGather)(scatter(rank, dtype, 3, form), scope)

    def rows(sender, receiver):
        if kind.endswith("all empty") or (kind.endswith("nothing") and sender == 1):
            return 0
        return (sender + 2 * receiver) % 3

    send = tuple(rows(place, other) for other in range(count))
    receive = tuple(rows(other, place) for other in range(count))
    return AllToAll(scatter(rank, dtype, sum(send), form), send, receive, scope)


def cases():
    for number, (kind, dtype) in enumerate((kind, dtype) for kind in KINDS for dtype in DTYPES):
        for shift, scope in enumerate(("world", "node", "rail")):
            yield kind, dtype, ["plain", "columns", "transposed", "flat"][(number + shift) % 4], scope


def program(rank, case):
    return (yield request_of(rank, *case))


def carry(rank, world, check_order):
    transport = Transport(PER_NODE, check_order)
    transport.recording = True
    answers = []
    for case in cases():
        answers.append(transport.complete(program(rank, case), "case").clone())
    together = [transport.start(request_of(rank, *case), "case") for case in cases()]  # all in flight
    agree = all(torch.equal(wait(), answer) for wait, answer in zip(together, answers, strict=True))
    records = transport.take_records()
    transport.close()
    return answers, [record.sent_bytes for record in records], [record.action for record in records], agree


@pytest.mark.parametrize("check_order", [False, True])
def test_gloo_answers_as_lockstep_does_and_counts_the_same_bytes(crew, check_order):
    carried = crew(WORLD).run(carry, check_order)
    for number, case in enumerate(cases()):
        want, sent = lockstep.run([program(rank, case) for rank in range(WORLD)], PER_NODE)
        for rank, (answers, bytes_sent, actions, agree) in enumerate(carried):
            assert agree and answers[number].dtype == want[rank].dtype
            assert torch.equal(answers[number], want[rank]), (case, rank)
            assert bytes_sent[number] == sent[rank], (case, rank)
            assert actions[number] == type(request_of(rank, *case)).__name__


def ask_apart(rank, world, kind):
    transport = Transport(1, check_order=True)
    ones = torch.ones(4)
    request = {
        "order": AllReduce(ones) if rank else AllGather(ones),
        "label": AllReduce(ones),
        "shape": AllReduce(ones[: 4 - rank]),
        "dtype": AllReduce(ones.double() if rank else ones),
        "splits": AllToAll(ones[:3], (1, 2), (1, 1 + rank)),
        "width": AllToAll(torch.ones(2, 1 + rank), (1, 1), (1, 1)),
        "one more": AllReduce(ones),
    }[kind]
    if kind == "one more" and rank == 1:
        transport.counts["world"] += 1
    with pytest.raises(RuntimeError, match=r"^ranks out of order") as caught:
        transport.start(request, f"group {rank}" if kind == "label" else "group")()
    transport.close()
    return str(caught.value)


APART = {
    "order": "rank 0 asks #1 group: AllGather in world, torch.float32, (4,); rank 1 asks #1 group: AllReduce",
    "label": "rank 0 asks #1 group 0: AllReduce in world, torch.float32, (4,); rank 1 asks #1 group 1:",
    "shape": "torch.float32, (4,); rank 1 asks #1 group: AllReduce in world, torch.float32, (3,)",
    "dtype": "torch.float32, (4,); rank 1 asks #1 group: AllReduce in world, torch.float64, (4,)",
    "splits": "rank 0 sends 2 rows to rank 1, which expects 1, in #1 group: AllToAll in world",
    "width": "rows of (1,); rank 1 asks #1 group: AllToAll in world, torch.float32, rows of (2,)",
    "one more": "rank 0 asks #1 group: AllReduce in world, torch.float32, (4,); rank 1 asks #2",
}


@pytest.mark.parametrize("kind", APART)
def test_check_order_says_on_every_rank_who_asked_what(crew, kind):
    for error in crew(2).run(ask_apart, kind):
        assert APART[kind] in error


def test_splits_are_compared_inside_their_scope():
    def of(send, receive):
        return AskedRequest(1, "x", send, receive)

    scopes = members("rail", 4, 2)
    assert scopes == [[0, 2], [1, 3]]
    fitting = [of((1, 5), (1, 2)), of((0, 3), (0, 4)), of((2, 0), (5, 0)), of((4, 0), (3, 0))]
    assert disagreement(fitting, scopes) == ""
    fitting[3] = of((4, 0), (9, 0))
    assert "rank 1 sends 3 rows to rank 3, which expects 9" in disagreement(fitting, scopes)


def speak_of_lost_peer(rank, world):
    transport = Transport(1, timeouts=Timeouts(None, 1.0))
    if rank == 1:
        time.sleep(1.5)
        return ""
    with pytest.raises(RuntimeError) as caught:
        transport.start(AllReduce(torch.ones(3)), "late")()
    return str(caught.value)


def test_a_peer_that_does_not_come_is_an_error_that_says_so(crew):
    error = crew(2).run(speak_of_lost_peer)[0]
    assert error.startswith(
        "rank 0: all-reduce of late, step 0: its peers did not come within timeout=1 s. rank 1: out"
    )


def helpers(rank, world):
    transport = Transport()
    columns = torch.arange(12.0).view(3, 4).T * (1 + rank)
    transport.spread(columns)
    largest = transport.agree_largest([float(rank), -float(rank)])
    everyone = transport.share({"rank": rank})
    transport.close()
    return columns.tolist(), largest, everyone


def test_spread_share_and_agree(crew):
    for columns, largest, everyone in crew(3).run(helpers):
        assert columns == torch.arange(12.0).view(3, 4).T.tolist()
        assert largest == [2.0, 0.0]
        assert everyone == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def restarted(rank, port, attempt, outbox):
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(attempt),
    )  # fmt: skip
    transport = Transport(timeouts=Timeouts(None, 20.0))
    total = transport.start(AllReduce(torch.tensor([rank + 1.0])), "sum")()
    outbox.put((attempt, rank, float(total)))
    outbox.close()
    outbox.join_thread()
    os.kill(os.getpid(), 9)  # dies without a word: its addresses stay in the store


def test_a_restarted_job_does_not_read_the_addresses_of_the_one_that_died():
    """As torchrun --max-restarts: the agent's store outlives the workers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = forkserver()
    outbox = fork.Queue()
    for attempt in range(2):
        workers = [fork.Process(target=restarted, args=(rank, store.port, attempt, outbox)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
            worker.kill()
        assert sorted(outbox.get(timeout=1) for _ in range(2)) == [(attempt, 0, 3.0), (attempt, 1, 3.0)]


@pytest.mark.parametrize(
    ("send", "receive", "complaint"),
    [((1, 1), (1,), "2 send sizes, 1 receive sizes"), ((1, 1), (1, 1), "add up to 2, the tensor has 3 rows")],
)
def test_a_split_that_does_not_fit_its_tensor_is_refused(send, receive, complaint):
    with pytest.raises(ValueError, match=complaint):
        AllToAll(torch.ones(3), send, receive)


def opened_again(rank, world):
    """By turns one of them comes late, whose connections of before are closed. One has another group besides."""
    if rank:
        dist.new_group([rank], use_local_synchronization=True)
    group, timeouts = dist.new_group(range(world)), Timeouts(report_after=10.0, timeout=15.0)
    sums = []
    for turn in range(3):
        time.sleep(0.3 * (turn % world == rank))
        transport = Transport(process_group=group, timeouts=timeouts)
        sums.append(float(transport.start(AllReduce(torch.tensor([rank + 1.0])), "sum")()))
        transport.close()
    return sums


def test_ranks_of_a_process_group_open_connections_again_and_again(crew):
    assert crew(2).run(opened_again) == [[3.0] * 3] * 2
