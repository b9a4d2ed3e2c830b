"""Lists of pipelines and rings, played under NCCL's rule and gloo's, settled and drained anywhere; planted faults."""

from collections import Counter
from itertools import combinations, product

import pytest

from armillary.schedules import Action, Clip, Schedule, StageMessage, lower_ring, lower_zero_ring, routes
from armillary.schedules.accumulation import accumulation
from armillary.schedules.checker import Setting, flaw
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.gpipe import gpipe
from armillary.schedules.instructions import Holdings, Instruction, operation
from armillary.schedules.lowering import Lowering, placed
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.schedules.rank_list import ChannelRules
from armillary.schedules.routes import owner_of, weight_path
from armillary.schedules.shared_stages import SharedPlacement
from armillary.schedules.simultaneous import simultaneous
from schedule_messages import lent_messages, pipeline_messages, ring_messages, shared_messages
from staged_models import rings

RULES = ("nccl", "gloo")
PIPELINES = [
    *(make(k, m) for make in (gpipe, one_f_one_b) for k, m in ((1, 1), (2, 1), (2, 3), (3, 2), (4, 5))),
    *(cyclic_pipeline(k, m, slack) for k, m in ((1, 2), (2, 1), (2, 4), (3, 2), (4, 5)) for slack in (0, 1, m)),
]
RINGS = [
    *(one for n in (2, 3, 4) for one in rings(n)[n % 3 :: 3]),
    *(cyclic(5, 3, 2), simultaneous(3, 2), delayed_all_reduce(3, 2)),
]
SHARED = [cyclic(n, slack=slack) for n in (1, 2, 3, 4) for slack in sorted({0, 1, n})]
NO_TIES = {}
CLIPS = (None, Clip(1.0, "stage"), Clip(1.0, "previous"), Clip(1.0, "global"))


def lists(schedule, calls, clip=None, one_queue=True, lends=False, shares=False, buffered=(), ties=NO_TIES):
    """What every rank is to do for these calls: a message each for a step, settling and draining."""
    found, ranks = [], SharedPlacement(schedule) if shares else range(schedule.workers)
    for rank in range(ranks.devices) if shares else ranks:
        wires = ChannelRules(one_queue, lends=lends, buffered=buffered, ties=ties)
        lowering = Lowering(schedule, rank, ranks, clip, wires=wires)
        does = {"t": lowering.next_step, "s": lowering.rest, "d": lowering.drain}
        found.append([one for call in calls for one in does[call]()])
    return found


def setting(schedule, calls, clip=None):
    drains = [calls[:place].count("t") for place, call in enumerate(calls) if call == "d"]
    return Setting(schedule, tuple(range(schedule.workers)), clip, drains)


def places(made, *ops):
    return [place for place, one in enumerate(made) if one.op in ops]


def put(between, places):
    """Where it may stand among the steps; what is not there stands at one place."""
    return places if between else places[:1]


def ways(schedule, clips):
    """Each clip with each place to settle or to drain, or none; of many workers every third, so that all are there."""
    every = list(product(clips, [("", 0), *product("sd", range(3))]))
    return every[:: 1 if schedule.workers < 4 else 3]


def in_time(schedule, clip, shares=False):
    try:
        placed(schedule, SharedPlacement(schedule) if shares else range(schedule.workers)).refuse_late_norm(clip)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "schedule", [*PIPELINES, *RINGS], ids=lambda s: f"{s.name}{s.stages}-{s.micro_batches}-{s.stale_share:.1f}"
)
def test_nothing_hangs_or_reads_what_is_not_there_wherever_it_is_settled_or_drained(schedule):
    for clip, (between, place) in ways(schedule, CLIPS):
        calls = "t" * (place + 1) + between + "t" * (3 - place) + "s"
        if in_time(schedule, clip):
            made, where = lists(schedule, calls, clip), setting(schedule, calls, clip)
            assert [flaw(made, where, rule) for rule in RULES] == ["", ""]
            assert flaw(lists(schedule, calls, clip, one_queue=False), where, "gloo") == ""


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    ("stages", "ties"), [(2, {1: 0}), (3, {2: 0}), (3, {1: 0, 2: 0}), (3, {1: 0, 2: 1}), (4, {2: 1, 3: 0})]
)
def test_gradients_that_stages_share_are_there_before_each_of_them_steps(make, stages, ties):
    for micro_batches, clip, between in product((1, 3, 5), (None, Clip(1.0, "global")), ("", "s", "d")):
        schedule, calls = make(stages, micro_batches), f"tt{between}tts"
        made, where = lists(schedule, calls, clip, ties=ties), setting(schedule, calls, clip)
        assert [flaw(made, where, rule) for rule in RULES] == ["", ""]
        assert flaw(lists(schedule, calls, clip, one_queue=False, ties=ties), where, "gloo") == ""
        for copy, owner in ties.items():
            mine = [(one.op, one.message and one.message.what) for one in made[copy] if one.op in ("TIE", "UPDATE")]
            steps = [("TIE", "shared gradient"), ("UPDATE", None)]
            assert [one for one in mine if one in steps] == steps * 4
            theirs = [one.message.stage for one in made[owner] if one.op == "TIE" and one.stage == owner]
            assert theirs.count(copy) == 4 + 4 * (owner in ties and owner == copy)


@pytest.mark.parametrize("schedule", RINGS, ids=lambda s: f"{s.name}{s.stages}-{s.micro_batches}-{s.stale_share:.1f}")
def test_weights_that_are_lent_are_there_when_they_are_read_and_gone_after_a_drain(schedule):
    for clip, between in product((None, Clip(1.0, "previous"), Clip(1.0, "global")), ("", "s", "d")):
        for place in put(between, (0, 2)):
            calls = "t" * (place + 1) + between + "t" * (3 - place) + "d"
            if in_time(schedule, clip):
                made, where = lists(schedule, calls, clip, lends=True), setting(schedule, calls, clip)
                assert [flaw(made, where, rule) for rule in RULES] == ["", ""]
                assert flaw(lists(schedule, calls, clip, one_queue=False, lends=True), where, "gloo") == ""


@pytest.mark.parametrize("schedule", SHARED, ids=lambda s: f"{s.stages}-{s.stale_share:.1f}")
def test_stages_by_turns_neither_hang_nor_read_what_is_not_there(schedule):
    """Ranks change from step to step, so it is played for more steps than it takes them to come round."""
    clips = [None if clip is None else clip.over(schedule.stages) for clip in CLIPS]
    for clip, (between, place) in ways(schedule, clips):
        if in_time(schedule, clip, shares=True):
            calls = "t" * (place + 1) + between + "t" * (5 - place) + "st"
            own, where = {"shares": True, "buffered": range(schedule.stages)}, setting(schedule, calls, clip)
            made = lists(schedule, calls + "s", clip, **own)
            assert [flaw(made, where, rule) for rule in RULES] == ["", ""]
            assert flaw(lists(schedule, calls + "d", clip, one_queue=False, **own), where, "gloo") == ""


class Mirrored:
    """A placement that no schedule has: the last worker is on rank 0."""

    def __init__(self, schedule):
        workers = tuple(reversed(range(schedule.workers)))
        self.inside, self.asked = placed(schedule, workers), []
        self.rank_of, self.ranks = self.inside.rank_of, self.inside.ranks

    def around(self, *told):
        self.asked.append(told)
        return self.inside.around(*told)


def test_a_placement_says_itself_what_crosses():
    for schedule in (gpipe(3, 2), cyclic(3)):
        mirrored = Mirrored(schedule)
        made = [Lowering(schedule, rank, mirrored) for rank in range(schedule.workers)]
        assert len(mirrored.asked) == schedule.workers
        rows = [[*one.next_step(), *one.next_step(), *one.rest()] for one in made]
        assert [flaw(rows, Setting(schedule, mirrored.inside.workers), rule) for rule in RULES] == ["", ""]
        assert rows[0] and {one.stage for one in rows[0] if one.op == "B"} >= {schedule.stages - 1}


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_the_messages_of_stages_by_turns_are_the_schedules_messages_step_by_step(clip):
    for schedule in (s for s in SHARED[3:] if in_time(s, clip, shares=True)):
        sharing, steps = SharedPlacement(schedule), 6
        sent = Counter(
            (rank, one.peer, "norm" if "norm" in one.message.what else one.message.what, one.stage)
            for rank, made in enumerate(lists(schedule, "t" * steps + "s", clip, shares=True))
            for one in made
            if one.op == "SEND"
        )
        messages = (m for step in range(steps) for m in shared_messages(sharing, step, clip))
        assert sent == Counter((m.sender, m.receiver, m.content, m.stage) for m in messages)


@pytest.mark.parametrize("one_queue", [True, False])
@pytest.mark.parametrize("schedule", SHARED[3:], ids=lambda s: f"{s.stages}-{s.stale_share:.1f}")
def test_of_what_is_as_large_as_a_stage_little_is_on_its_way(schedule, one_queue):
    """Else a rank that seldom acts holds sums of several steps. Those that were needed go before the next leaves."""
    most = 1 if schedule.stages == 2 else 2  # where ranks change from step to step, the next may leave first
    for rank, made in enumerate(lists(schedule, "tttttt", one_queue=one_queue, shares=True)):
        under_way = {}
        for one in made:
            if one.op in ("SEND", "WAIT_SEND") and one.message.what in ("weights", "partial gradient", "gradient"):
                messages = under_way.setdefault((one.peer, one.message.edge), set())
                (messages.add if one.op == "SEND" else messages.discard)(one.message)
                assert len(messages) <= most, f"rank {rank}: {sorted(messages)}, {schedule}"


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_the_messages_of_a_step_are_the_schedules_messages(clip):
    for schedule in (s for s in [*PIPELINES, *RINGS] if in_time(s, clip)):
        steps = 5
        messages = ring_messages if schedule in RINGS else pipeline_messages
        assert sent_of(schedule, clip, steps) == wanted_of(messages(schedule, clip), steps)


def sent_of(schedule, clip, steps):
    """How often, by ranks, content and stage. A norm is of no stage."""
    return Counter(
        (rank, one.peer, *(("norm",) if "norm" in one.message.what else (one.message.what, one.stage)))
        for rank, made in enumerate(lists(schedule, "t" * steps + "s", clip))
        for one in made
        if one.op == "SEND"
    )


def wanted_of(messages, steps):
    contents = [(m.sender, m.receiver, *(("norm",) if m.content == "norm" else (m.content, m.stage))) for m in messages]
    return Counter(contents * steps)


def backwards(schedule, stage):
    """From the owner to the others, against the order in which they read."""
    owner, *others = weight_path(schedule, stage)
    return owner, *reversed(others)


PLANTED = {
    "weight_path": backwards,
    "sum_path": lambda schedule, stage, clip=None: tuple(range(schedule.workers)),  # with a hop that can be saved
    "owner_of": lambda schedule, stage: (owner_of(schedule, stage) + 1) % schedule.workers,
}


@pytest.mark.parametrize("route", PLANTED)
def test_a_wrong_route_is_seen_by_the_formulas(monkeypatch, route):
    """They know no route of the library's."""
    schedule = cyclic(4, slack=1)
    assert sent_of(schedule, None, 5) == wanted_of(ring_messages(schedule), 5)
    for module in (lower_ring, routes, lower_zero_ring):
        monkeypatch.setattr(module, route, PLANTED[route], raising=False)
    assert sent_of(schedule, None, 5) != wanted_of(ring_messages(schedule), 5)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_where_weights_are_lent_the_messages_of_a_step_are_the_schedules_messages(clip):
    """Of the sixth; some of the first come from owners instead, and one more step's leave with the last."""
    for schedule in (s for s in RINGS if in_time(s, clip)):
        sent = [
            Counter(
                (rank, one.peer, one.message.what, one.stage)
                for rank, made in enumerate(lists(schedule, "t" * steps, clip, lends=True))
                for one in made
                if one.op == "SEND"
            )
            for steps in (5, 6)
        ]
        wanted = Counter((m.sender, m.receiver, m.content, m.stage) for m in lent_messages(schedule, clip))
        assert sent[1] - sent[0] == wanted


def test_every_message_is_received_in_the_order_of_its_sends_both_directions_of_a_pair_together():
    for schedule, is_lent in [*product(PIPELINES, [False]), *product(RINGS, [False, True])]:
        made = lists(schedule, "tttsts", Clip(1.0, "previous"), lends=is_lent)
        for one, other in combinations(range(schedule.workers), 2):
            orders = [
                [
                    (i.message, (i.op == "SEND") == (rank == one))
                    for i in made[rank]
                    if i.peer == peer and i.op in ("SEND", "RECV")
                ]
                for rank, peer in ((one, other), (other, one))
            ]
            assert orders[0] == orders[1] and (orders[0] or other - one > 1)


def test_where_directions_are_apart_room_is_made_long_before_it_is_needed():
    """For a step's activations at its beginning, for a gradient right behind the forward that it answers."""
    for schedule in (one_f_one_b(3, 6), gpipe(3, 6)):
        for rank, made in enumerate(lists(schedule, "t", one_queue=False)):
            first = places(made, "F")[0]
            assert Counter(one.message.what for one in made[:first]) == ({"activation": 6} if rank else {})
            for at in places(made, "F") if rank < 2 else []:
                following = made[at + 1 : at + 1 + next(iter(places(made[at + 1 :], "F", "B")))]
                gradient = StageMessage("activation gradient", 0, made[at].micro_batch, rank + 1)
                assert gradient in [one.message for one in following if one.op == "RECV"]
    narrow = lists(gpipe(3, 6), "t")[1]
    assert places(narrow, "RECV")[6] > places(narrow, "SEND")[0], "in one queue a receive stays behind what is before"


def test_one_device_and_accumulation_send_nothing():
    for schedule in (cyclic(3), accumulation(3, 2)):
        lowering = Lowering(schedule, 0, [0] * schedule.workers, Clip(1.0, "previous"))
        made = [*lowering.next_step(), *lowering.next_step(), *lowering.rest()]
        assert {one.op for one in made} == {"F", "B", "UPDATE", "NORM"}
        one_rank = Setting(schedule, (0,) * schedule.workers, Clip(1.0, "previous"))
        assert not flaw([made], one_rank, "nccl")


def test_what_shares_a_stage_in_another_way_is_refused():
    with pytest.raises(ValueError, match=r"several of the ranks \(0, 0, 1\).* want a rank for each, or one for all"):
        Lowering(cyclic(3), 0, [0, 0, 1])
    with pytest.raises(ValueError, match="makes no ring"):
        Lowering(two_micro_batches_each(), 0, range(2))


def two_micro_batches_each():
    """Two workers with all stages, each of two micro-batches."""
    rows = tuple(
        tuple(Action(2 * n + t, 1, kind, 0, 2 * worker + n) for n in range(2) for t, kind in enumerate("FB"))
        for worker in range(2)
    )
    return Schedule("shares", 4, rows, ((0,),) * 4)


# planted faults


def two(change):
    """The lists of two ranks of 1F1B, one of them changed."""
    schedule = one_f_one_b(2, 3)
    made = lists(schedule, "tts")
    return change(made), setting(schedule, "tts")


def test_two_receives_that_change_places_are_found():
    def swapped(made):
        first, second = places(made[1], "RECV")[:2]
        made[1][first], made[1][second] = made[1][second], made[1][first]
        return made

    made, where = two(swapped)
    for rule in RULES:
        assert flaw(made, where, rule) == (
            "rank 0 sends activation of stage 0, step 0, micro-batch 0, "
            "but rank 1 next wants activation of stage 0, step 0, micro-batch 1"
        )


def test_two_ranks_that_send_first_hang_under_nccls_rule_alone():
    """Each makes room for the other's message only behind its own: on gloo either can move, on NCCL none is first."""

    def first(made):
        second = places(made[1], "RECV")[1]
        send = places(made[1], "SEND")[0]
        made[1].insert(send, made[1].pop(second))  # the gradient goes first, at its place the second activation
        return made

    made, where = two(first)
    assert flaw(made, where, "gloo") == ""
    hung = flaw(made, where, "nccl")
    assert "rank 0 waits at B 0.0 of step 0" in hung and "rank 1 waits at F 1.1 of step 0" in hung
    both = next(place for place, one in enumerate(made[1]) if one.op == "SEND")
    made[1][both : both + 2] = [made[1][both : both + 2]]
    assert flaw(made, where, "nccl") == "", "a batch moves together"


def test_a_message_that_nobody_reads_is_found():
    message = StageMessage("partial norm", 0, -1, 1)

    def useless(made):
        made[1] += [Instruction("NORM", 99, 0, -1, 1), Instruction("SEND", 99, 0, -1, 1, message, 0)]
        made[0].append(Instruction("RECV", 99, 0, -1, 1, message, 1))
        return made

    made, where = two(useless)
    for rule in RULES:
        assert flaw(made, where, rule) == f"rank 0 never reads {message}; rank 1 never waits for {message}"
    made[0].pop()
    for rule in RULES:
        assert flaw(made, where, rule) == f"rank 1: SEND {message} (0) never moves"


def test_a_receive_that_is_never_answered_is_found():
    made, where = two(lambda made: made)
    made[0] = [one for one in made[0] if one.message != StageMessage("activation", 1, 2, 0)]
    assert "rank 1 waits at F 1.2 of step 1: activation of stage 0, step 1, micro-batch 2 is missing" in flaw(
        made, where, "gloo"
    )


def test_a_forward_whose_weights_are_stepped_too_late_is_found():
    made, where = two(lambda made: made)
    update = places(made[0], "UPDATE")[0]
    made[0].append(made[0].pop(update))
    for rule in RULES:
        assert "waits at F 0.0 of step 1: version 1 of stage 0 is missing" in flaw(made, where, rule)


def three_in_a_ring(change):
    """The lists of three ranks of a ring, some of them changed."""
    schedule = cyclic(3, slack=1)
    made = lists(schedule, "ttts")
    change(made)
    return [flaw(made, setting(schedule, "ttts"), rule) for rule in RULES]


def test_a_sum_without_one_ranks_gradients_is_found():
    def unjoined(made):
        first = places(made[2], "SUM")[0]
        made[2][first] = made[2][first]._replace(op="RECV_NORM")  # takes the message, and adds nothing

    for found in three_in_a_ring(unjoined):
        assert "UPDATE" in found and "gradients of micro-batches [0, 1] are missing" in found


def test_weights_handed_on_before_they_have_come_are_found():
    def early(made):
        for rank in made:
            for send in (place for place in places(rank, "SEND") if rank[place].message.what == "weights"):
                if rank[send - 1].op == "UNSHARD":
                    rank[send - 1], rank[send] = rank[send], rank[send - 1]
                    return
        raise AssertionError("no rank hands weights on")

    for found in three_in_a_ring(early):
        assert "version 1 of stage" in found and "is missing" in found


def test_a_forward_that_does_not_wait_for_its_weights_is_found():
    def late(made):
        for rank in made:
            for first in places(rank, "UNSHARD"):
                if rank[first + 1].op == "F":  # nobody waits for them here
                    rank[first], rank[first + 1] = rank[first + 1], rank[first]
                    return
        raise AssertionError("every rank hands weights on")

    for found in three_in_a_ring(late):
        assert "waits at F" in found and "is missing" in found


def test_gradients_that_nobody_steps_with_are_found():
    def lost(made):
        for rank in made:
            for place in places(rank, "UPDATE")[-1:]:
                del rank[place]

    for found in three_in_a_ring(lost):
        assert "never steps with gradients of stage" in found or ("version" in found and "is missing" in found)


def three_that_lend(change):
    """The lists of three ranks whose weights are lent, some of them changed."""
    schedule = cyclic(3, slack=1)
    made = lists(schedule, "tttd", lends=True)
    change(made)
    return [flaw(made, setting(schedule, "tttd"), rule) for rule in RULES]


def test_weights_that_are_given_back_before_they_are_read_are_found():
    def early(made):
        back = next(place for place in places(made[0], "RESHARD") if made[0][place].message is not None)
        read = max(place for place in places(made[0], "F", "B") if place < back)
        made[0].insert(read, made[0].pop(back))

    for found in three_that_lend(early):
        assert "rank 0 waits at" in found and "is missing" in found


def test_weights_that_nobody_gives_back_are_found():
    def kept(made):
        del made[2][next(place for place in places(made[2], "RESHARD") if made[2][place].message is not None)]

    for found in three_that_lend(kept):
        assert "rank 2 never lets go of" in found


def test_a_version_that_its_owner_lets_go_before_it_is_lent_is_found():
    def early(made):
        for rank in made:
            for send in places(rank, "SEND"):
                gone = rank[send].message.version if rank[send].message.what == "backward weights" else -1
                own = [p for p in places(rank, "RESHARD") if rank[p].message is None and p > send]
                those = [p for p in own if (rank[p].stage, rank[p].step) == (rank[send].stage, gone)]
                if those:
                    rank.insert(send, rank.pop(those[0]))
                    return
        raise AssertionError("no owner lends")

    for found in three_that_lend(early):
        assert "is not here to be lent as backward weights" in found or "is missing" in found


def test_weights_are_sent_in_their_newest_version_alone():
    """An older version may be forgotten by the time its message starts."""
    update, send = operation("UPDATE"), operation("SEND")
    held = Holdings(simultaneous(2, 1))
    for step in (-1, 0):
        held.here.update(update.makes(Instruction("UPDATE", 1, step, 0, 0), held))
    for version, missing in ((1, []), (0, ["newest weights"])):
        one = Instruction("SEND", 1, 1, 0, 0, StageMessage("weights", version, 0, 0), 1)
        assert [message.what for message in send.reads(one, held) if message not in held.here] == missing
