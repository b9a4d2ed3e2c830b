"""Images are read as written; the networks have the published shape; what is missing is named."""

import gzip
import importlib.util

import numpy as np
import pytest
import torch

from armillary.workloads import vision
from armillary.workloads import vision as resnet
from armillary.workloads import vision as vit


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def test_an_idx_file_reads_back(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (3, 4, 5)).astype(np.uint8)
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    np.testing.assert_array_equal(vision.read_idx(tmp_path / "a.gz"), array)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"\x89PNG and so on"))
    with pytest.raises(ValueError, match=r"b\.gz is not an IDX file"):
        vision.read_idx(tmp_path / "b.gz")
    (tmp_path / "c.gz").write_bytes(gzip.compress(idx(array))[:-9])
    with pytest.raises(ValueError, match=r"c\.gz is damaged or no gzip file .*; fetch it anew"):
        vision.read_idx(tmp_path / "c.gz")


def test_fashion_mnist_is_padded_to_32_by_black(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("t10k", 4)):
        pixels = rng.integers(1, 256, (count, 28, 28)).astype(np.uint8)
        (tmp_path / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        labels = np.arange(count, dtype=np.uint8)
        (tmp_path / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    monkeypatch.setattr(vision, "FASHION_MNIST", tmp_path)
    found = vision.fashion_mnist()
    assert found.train.shape == (6, 32, 32) and found.held_out.shape == (4, 32, 32) and found.classes == 6
    assert (found.train > 0).sum() == 6 * 28 * 28 and (found.held_out > 0).sum() == 4 * 28 * 28
    np.testing.assert_array_equal(found.held_out[:, 2:-2, 2:-2], pixels)


def test_missing_images_name_the_command_and_the_stand_in(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "FASHION_MNIST", tmp_path)
    with pytest.raises(ValueError, match=r"apt-get install dataset-fashion-mnist .*data=digits"):
        vision.workload()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        vision.workload(data="digits")


@pytest.mark.skipif(
    not vision.FASHION_MNIST.is_dir(), reason="needs real images: apt-get install dataset-fashion-mnist"
)
def test_the_real_images_are_balanced():
    found = vision.fashion_mnist()
    np.testing.assert_array_equal(np.bincount(found.train_labels), [6000] * 10)
    np.testing.assert_array_equal(np.bincount(found.held_out_labels), [1000] * 10)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs pip install scikit-learn")
def test_the_digits_of_scikit_learn_are_all_there():
    found = vision.digits()
    assert len(found.train) + len(found.held_out) == 1797
    assert found.classes == 10 and found.train.max() == 240


def test_training_pixels_have_mean_zero_and_deviation_one():
    work = vision.workload(**vision.SMALL)
    pixels = torch.cat([batch[0] for batch in work.batches("train", 0, 1, 0)])
    assert pixels.mean().item() == pytest.approx(0, abs=1e-5)
    assert pixels.std().item() == pytest.approx(1, abs=1e-3)


def test_resnet18_of_width_64_has_the_published_size():
    """11,173,962 is He et al.'s network with the CIFAR stem, 10 classes and 3 channels; ours has one channel."""
    network = resnet.resnet18(classes=10, width=64, norm="batch")
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962 - 2 * 64 * 9
    assert sum(isinstance(part, torch.nn.Conv2d) for part in network.modules()) == 20  # 17 and 3 shortcuts


@pytest.mark.parametrize("side", [8, 32])
def test_both_networks_score_every_image(side):
    batch = torch.randn(3, 1, side, side)
    assert resnet.resnet18(5, 4, "batch")(batch).shape == (3, 5)
    assert vit.vit(side, 5, 32, depth=2)(batch).shape == (3, 5)


@pytest.mark.parametrize("network", [resnet.resnet18(4, 16, "group"), vit.vit(8, 4, 16, 2)])
def test_without_batch_norm_an_image_is_scored_alike_in_any_company(network):
    network = network.double()
    batch = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(network(batch)[2:3], network(batch[2:3]))


def test_attention_is_softmax_of_queries_and_keys_by_plain_arithmetic():
    torch.manual_seed(0)
    block = vit.Block(width=32, heads=2).double()
    vectors = torch.randn(1, 4, 32, dtype=torch.float64)
    parts = block.queries_keys_values(block.norm_attention(vectors))[0].chunk(3, dim=1)
    heads = []
    for head in (slice(0, 16), slice(16, 32)):
        query, key, value = (part[:, head] for part in parts)
        heads.append((query @ key.T / 4).softmax(1) @ value)
    added = vectors[0] + block.projection(torch.cat(heads, dim=1))
    torch.testing.assert_close(block(vectors)[0], added + block.perceptron(block.norm_perceptron(added)))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"data": "cifar"}, "no data 'cifar'"),
        ({"architecture": "vgg"}, "no architecture 'vgg'"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_unknown_choices_are_refused_by_name(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        vision.workload(**{**vision.SMALL, **options})


def test_an_unknown_norm_and_an_odd_width_are_refused():
    with pytest.raises(ValueError, match="no norm 'layer'"):
        vision.workload(**{**vision.SMALL, "norm": "layer"}).model()
    with pytest.raises(ValueError, match="width 12"):
        vit.vit(8, 4, 12, 1)
