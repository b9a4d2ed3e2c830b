"""Laws of a mesh: every rank has one place, the first axis varies slowest, and groups along an axis share the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import Axis, Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: Mesh(tuple(Axis(name, size) for name, size in zip(("data", "stage", "tensor"), sizes)))
)


@given(meshes)
def test_coordinates_count_up_with_the_ranks(mesh):
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.workers)]
    assert places == sorted(set(places)) and len(places) == mesh.workers
    assert all(list(mesh.coordinates(rank)) == list(mesh.sizes) for rank in range(mesh.workers))


@given(meshes)
def test_groups_along_an_axis_share_out_the_ranks_and_differ_in_that_axis_only(mesh):
    for name, size in mesh.sizes.items():
        groups = mesh.members(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.workers))
        for group in groups:
            assert [mesh.coordinates(rank)[name] for rank in group] == list(range(size))
            others = [{k: v for k, v in mesh.coordinates(rank).items() if k != name} for rank in group]
            assert all(other == others[0] for other in others)


def test_by_hand():
    mesh = Mesh.of(data=2, stage=3)
    assert str(mesh) == "data 2 x stage 3" and mesh.workers == 6 and mesh.data_coordinates == 2
    assert [mesh.data_coordinate(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert mesh.members("data") == [[0, 3], [1, 4], [2, 5]] and mesh.members("stage") == [[0, 1, 2], [3, 4, 5]]
    assert Mesh.of(stage=3).data_coordinates == 1 and Mesh.of(stage=3).data_coordinate(2) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mesh(()), "want one axis or more"),
        (lambda: Mesh((Axis("data", 1), Axis("data", 2))), r"each with a name of its own, got \['data', 'data'\]"),
        (lambda: Mesh.of(data=0), "1 rank or more, got 'data', 0"),
        (lambda: Axis("the data", 2), "a plain name"),
        (lambda: Mesh.of(data=2).coordinates(2), "no rank 2 among 2"),
        (lambda: Mesh.of(data=2).coordinates(-1), "no rank -1 among 2"),
        (lambda: Mesh.of(data=2).members("stage"), "no axis 'stage'; there are data"),
    ],
)
def test_nonsense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
