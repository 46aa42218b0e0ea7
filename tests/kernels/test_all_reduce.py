# SPDX-License-Identifier: MIT
"""``all_reduce``: ranks as threads, one rank whose peers have written, and streams of GPUs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oss_fused.errors import SchemeError, ShapeMismatchError, UnsupportedDeviceError
from oss_fused.kernels.all_reduce import BLOCK_BYTES, inbox_bytes, reference
from oss_fused.kernels.op import get_kernel

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {2: torch.int16, 4: torch.int32}
BLOCKS = 24
# a vector, a block but one vector, a block, a vector more, and all that fits
FULL = BLOCKS * BLOCK_BYTES
SIZES = [16, BLOCK_BYTES - 16, BLOCK_BYTES, BLOCK_BYTES + 16, FULL]


class Ranks:
    """Memory of some ranks, each on a device."""

    def __init__(self, *devices):
        size = inbox_bytes(len(devices), BLOCKS)
        self.boxes = [torch.full((size,), 0xFF, dtype=torch.uint8, device=d) for d in devices]
        places = [box.data_ptr() for box in self.boxes]
        self.inboxes = [torch.tensor(places, device=device) for device in devices]
        self.rounds = [torch.zeros(BLOCKS, dtype=torch.int32, device=d) for d in devices]

    def run(self, backend, rank, x):
        return get_kernel(backend, "all_reduce")(x, self.inboxes[rank], self.rounds[rank], rank)

    def places(self, rank, dtype):
        """The inbox as [turn, source, element] integers of the dtype's bytes."""
        world = len(self.boxes)
        return self.boxes[rank].view(BITS[dtype.itemsize]).view(2, world, -1)

    def assert_empty(self, rank):
        assert (self.boxes[rank] == 0xFF).all()


def values(size, dtype, seed):
    """Normal values with NaN, Inf, zeros of both signs, and the bits that mark an empty place."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size // dtype.itemsize, generator=draw).to(dtype)
    special = [float("nan"), float("inf"), -0.0, 0.0, float("-inf"), torch.finfo(dtype).max]
    where = torch.randperm(len(x), generator=draw)
    for place, value in zip(where[::5].tolist(), special):
        x[place] = value
    x.view(BITS[dtype.itemsize])[where[1::7]] = -1
    # in the same place on every rank
    x[0] = -0.0
    return x


def summed(parts):
    total = parts[0].cpu().float()
    for part in parts[1:]:
        total = total + part.cpu().float()
    return total.to(parts[0].dtype)


def assert_same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    got = got.cpu()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    # of zeros the sign as well
    assert torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_twins_in_threads(world, dtype):
    ranks = Ranks(*["cpu"] * world)
    sizes = [*SIZES, 2 * FULL + 16, *SIZES]
    parts = [[values(size, dtype, 7 * k + r) for k, size in enumerate(sizes)] for r in range(world)]

    def rank(number):
        return [ranks.run("torch", number, x) for x in parts[number]]

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank, range(world)))
    for k in range(len(sizes)):
        for got in found:
            assert_same(got[k], summed([part[k] for part in parts]))
    for number in range(world):
        ranks.assert_empty(number)
        # the first block took part in all launches, the last one in those that are full
        assert ranks.rounds[number][[0, -1]].tolist() == [len(sizes) + 2, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1), (4, 3)])
def test_one_rank_whose_peers_have_written(world, rank, dtype, device):
    """Its sum, what it writes for others, and the empty places that it leaves, round by round."""
    ranks = Ranks(*[device] * world)
    peers = [peer for peer in range(world) if peer != rank]
    calls = [0] * BLOCKS
    for k, size in enumerate(SIZES):
        parts = [values(size, dtype, 9 * k + r) for r in range(world)]
        count, block = size // dtype.itemsize, BLOCK_BYTES // dtype.itemsize
        sent = []
        for part in parts:
            bits = part.view(BITS[dtype.itemsize])
            sent.append(torch.where(bits == -1, torch.iinfo(bits.dtype).max, bits).to(device))
        turns = [calls[place // block] % 2 for place in range(0, count, block)]
        for number, turn in enumerate(turns):
            part = slice(number * block, min((number + 1) * block, count))
            for peer in peers:
                ranks.places(rank, dtype)[turn, peer, part] = sent[peer][part]
            calls[number] += 1
        assert_same(ranks.run("triton", rank, parts[rank].to(device)), summed(parts))
        ranks.assert_empty(rank)
        assert ranks.rounds[rank].tolist() == calls
        for number, turn in enumerate(turns):
            part = slice(number * block, min((number + 1) * block, count))
            for peer in peers:
                written = ranks.places(peer, dtype)[turn, rank, part]
                assert torch.equal(written, sent[rank][part])
                written.fill_(-1)
        for peer in peers:
            ranks.assert_empty(peer)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_several_rounds_empty_strided_and_misaligned(backend, device):
    if backend == "torch" and torch.device(device).type != "cpu":
        pytest.skip("the twin reads addresses of a CPU")
    ranks = Ranks(device)
    assert ranks.run(backend, 0, torch.empty(0, 8, device=device)).shape == (0, 8)
    x = torch.randn(5 * FULL // 16 + 4, device=device)
    assert torch.equal(ranks.run(backend, 0, x), x)
    assert ranks.rounds[0].tolist() == [2] * 7 + [1] * 17
    x = torch.randn(34, 24, device=device)
    for view in (x.t()[:8], x.view(-1)[1:33], x[:, :8]):
        before = view.clone()
        operator = torch.ops.oss_fused.all_reduce
        found = operator(view, ranks.inboxes[0], ranks.rounds[0], 0)
        assert torch.equal(found, before) and found.is_contiguous()


def test_arguments():
    ranks = Ranks("cpu", "cpu")
    operator = torch.ops.oss_fused.all_reduce
    with pytest.raises(ShapeMismatchError, match=r"x\.shape=\(7,\): 28 bytes, .* multiple of 16"):
        operator(torch.ones(7), ranks.inboxes[0], ranks.rounds[0], 0)
    with pytest.raises(ShapeMismatchError, match=r"rounds\.shape=\(0,\): expected at least one"):
        operator(torch.ones(8), ranks.inboxes[0], ranks.rounds[0][:0], 0)
    for rank in (-1, 2):
        with pytest.raises(SchemeError, match=f"rank={rank}: expected 0 to 1"):
            operator(torch.ones(8), ranks.inboxes[0], ranks.rounds[0], rank)
    with pytest.raises(UnsupportedDeviceError, match=r"x\.device=meta"):
        reference.all_reduce(torch.ones(8, device="meta"), ranks.inboxes[0], ranks.rounds[0], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_drift_apart_on_a_gpu(world):
    """Streams of one GPU, or a GPU each; launches follow one another without a host's wait."""
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", rank % count) for rank in range(world)]
    for one in devices:
        for other in devices:
            # PyTorch lets a GPU write to another one's memory at the first copy
            torch.ones(8, device=one).to(other)
    ranks = Ranks(*devices)
    draw = torch.Generator().manual_seed(world)
    sizes = [16 * int(n) for n in torch.randint(1, 3 * FULL // 16, (300,), generator=draw)]
    parts = [[values(size, torch.bfloat16, 5 * r + k).to(d) for k, size in enumerate(sizes)]
             for r, d in enumerate(devices)]  # fmt: skip
    streams = [torch.cuda.Stream(device) for device in devices]
    for stream in streams:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            torch.cuda._sleep(1000)
            # memory for the results: while a rank waits for another, a GPU may not give any
            held = [torch.empty(2**20, dtype=torch.uint8, device=stream.device) for _ in range(64)]
            del held
        torch.cuda.synchronize(stream.device)
    found = [[] for _ in devices]
    for k in range(len(sizes)):
        for rank, stream in enumerate(streams):
            with torch.cuda.device(devices[rank]), torch.cuda.stream(stream):
                if k % 11 == rank:
                    torch.cuda._sleep(200_000)
                found[rank].append(ranks.run("triton", rank, parts[rank][k]))
    for device in devices:
        torch.cuda.synchronize(device)
    for k in range(len(sizes)):
        want = summed([part[k] for part in parts])
        for rank in range(world):
            assert_same(found[rank][k], want)
    for rank in range(world):
        ranks.assert_empty(rank)
