"""Torch tensors among ranks: checksums tell tensors apart, any type and layout arrives. pytest runs it in an interpreter with torch."""

import pytest
import torch

from mlflow_batchai.training import _optimizer, _tensors


class Horovod:
    """One of two ranks, whose peer holds the same number of elements: the root sends what it is told to."""

    Sum = "sum"

    def __init__(self, rank, mail):
        self._rank = rank
        self._mail = mail

    def rank(self):
        return self._rank

    def size(self):
        return 2

    def broadcast(self, tensor, root, name):
        if self._rank == root:
            self._mail.append(tensor.clone())
            return tensor
        received = self._mail.pop(0)
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
        return received

    def allreduce(self, tensor, op, name):
        assert op == self.Sum
        return tensor * 3


def every_kind():
    torch.manual_seed(1)
    return [
        torch.randn(3, 4),
        torch.tensor(5),
        torch.tensor(True),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(6, 5).t(),
        torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(7).bfloat16(),
        torch.randn(()).half(),
        torch.zeros(0),
        torch.randint(0, 9, (3,), dtype=torch.uint8),
        torch.randn(5).double(),
    ]


@pytest.mark.parametrize("message", [16, 1 << 20])
def test_what_the_root_has_arrives_whatever_its_type_and_layout(monkeypatch, message):
    monkeypatch.setattr(_tensors, "_CHUNK", message)
    mail = []
    sent = every_kind()
    received = [torch.zeros_like(tensor) for tensor in sent]
    assert _tensors.layout(sent) == _tensors.layout(received)
    _tensors.broadcast(Horovod(0, mail), sent, 0, "test")
    assert len(mail) > 10 or message > 16
    _tensors.broadcast(Horovod(1, mail), received, 0, "test")
    assert not mail
    for a, b in zip(sent, received, strict=True):
        assert torch.equal(a, b)
    assert _tensors.checksums(sent) == _tensors.checksums(received)


def test_layouts_differ_where_sizes_do():
    assert _tensors.layout([torch.zeros(3)]) != _tensors.layout([torch.zeros(4)])
    assert _tensors.layout([torch.zeros(3)]) != _tensors.layout([torch.zeros(1), torch.zeros(2)])


def test_means_are_reckoned_in_doubles_and_keep_their_type():
    tensors = [torch.full((2, 2), 1.0), torch.tensor(5.0).half()]
    _tensors.average(Horovod(0, []), tensors, "test")
    assert torch.equal(tensors[0], torch.full((2, 2), 1.5))
    assert tensors[1].dtype == torch.float16 and float(tensors[1]) == 7.5


def test_checksums_tell_tensors_apart(monkeypatch):
    monkeypatch.setattr(_tensors, "_WORDS", 300)  # several parts
    torch.manual_seed(2)
    plain = torch.randn(1000)
    others = [plain.clone() for _ in range(5)]
    others[0][3], others[0][900] = plain[900], plain[3]
    others[1][7] += 1e-6
    others[2][[5, 6]] = -plain[[5, 6]]
    others[3] = plain.flip(0)
    others[4] = plain + 1
    assert len({_tensors.checksums([tensor]) for tensor in [plain, *others]}) == 6
    assert len({_tensors.checksums([torch.eye(9)[i]]) for i in range(9)}) == 9
    assert _tensors.checksums([plain, others[0]])[:8] == _tensors.checksums([plain])


def test_a_checksum_does_not_depend_on_how_it_is_cut_up(monkeypatch):
    plain = torch.randn(1000)
    whole = _tensors.checksums([plain])
    monkeypatch.setattr(_tensors, "_WORDS", 7)
    assert _tensors.checksums([plain]) == whole


@pytest.mark.parametrize("old", [False, True])
def test_gradients_are_divided_by_a_tensor(monkeypatch, old):
    def refuse(tensors, scalar):
        raise TypeError("_foreach_div(): argument 'other' must be tuple of Tensors, not Tensor")

    if old:
        monkeypatch.setattr(torch, "_foreach_div", refuse)
    found = _optimizer._divided([torch.ones(2), torch.ones(1, 3).half()], torch.tensor(4.0))
    assert [(one.dtype, one.shape, float(one.sum())) for one in found] == [
        (torch.float32, (2,), 0.5),
        (torch.float16, (1, 3), 0.75),
    ]
