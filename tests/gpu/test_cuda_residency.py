"""On an accelerator: a model held to a plan trains, to the bit, as one that keeps all; its tier a disk, or the host."""

import pytest
import torch

from armillary import residency
from held_models import KINDS, adam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an accelerator: torch.cuda.is_available() is False"
    ),
]
STEPS = 3


def steps(kind, model, optimizer):
    """Gradients and buffers of each step, weights at the end."""
    found = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        kind.loss(model, kind.batch(step).cuda()).backward()
        found |= {f"gradient {n} of step {step}": p.grad.clone() for n, p in model.named_parameters()}
        found |= {f"buffer {n} of step {step}": b.clone() for n, b in model.named_buffers()}
        optimizer.step()
    return found | {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture
def alike():
    """cuDNN may choose another algorithm for the same convolution."""
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("tier", ["pinned", "disk"])
@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize("name", ["transformer", "convolution"])
def test_swapped_and_recomputed_stages_train_as_kept_ones(alike, tmp_path, tier, stream, name):
    kind, words = KINDS[name], ["swap", "recompute", "swap", "keep", "swap", "swap"]
    place = tmp_path if tier == "disk" else "pinned"
    with torch.cuda.stream(torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()):
        plain = kind.model().cuda()
        expected = steps(kind, plain, adam(plain))
        model = kind.model().cuda()
        optimizer = adam(model)
        batches = [kind.batch(0).cuda()]
        constraints = {str(number): word for number, word in enumerate(words)}
        held = residency.hold(
            model, batches, kind.loss, tier=place, optimizer=optimizer, constraints=constraints, memory_bytes=1 << 30
        )
        with held:
            found = steps(kind, model, optimizer)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert held.measured.moved_bytes > 0 and held.measured.seconds > 0


def test_the_device_holds_less(tmp_path):
    kind = KINDS["transformer"]
    batch = torch.randn(256, 256, 32, device="cuda")
    peaks = {}
    for word in ("keep", "swap"):
        model = kind.model(12).cuda()
        held = residency.hold(model, [batch], kind.loss, tier="pinned", constraints={"*": word})
        with held:
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                kind.loss(model, batch).backward()
                peaks[word] = torch.cuda.max_memory_allocated() - before
    assert peaks["swap"] < 0.6 * peaks["keep"]
