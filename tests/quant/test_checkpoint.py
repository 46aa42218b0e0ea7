# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from oss_fused.errors import CheckpointError
from oss_fused.quant.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from oss_fused.quant.checkpoint.writer import check_places

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.arange(6.0).view(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, folder / "two.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_reader_finds_tensors_in_shards(sharded: Path) -> None:
    reader = CheckpointReader(sharded)
    assert reader.names() == ["a", "b"] and "a" in reader and "c" not in reader
    assert reader.shape("a") == (2, 3) and reader.dtype("b") is torch.bfloat16
    assert torch.equal(reader.read("a"), torch.arange(6.0).view(2, 3))
    assert reader.read("a", 1).tolist() == [3.0, 4.0, 5.0]


def test_reader_names_a_missing_folder_or_file(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"MODEL='.*nowhere': no such folder"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: file is missing"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="tensor 'c' is missing"):
        CheckpointReader(sharded).read("c")
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: shard is missing"):
        CheckpointReader(sharded)
    (sharded / INDEX).unlink()
    (sharded / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match="found neither"):
        CheckpointReader(sharded)


def test_shards_without_an_index_are_read_as_vllm_loads_them(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert CheckpointReader(sharded).names() == ["a", "b"]
    save_file({"b": torch.zeros(4)}, sharded / "left-over.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor 'b' is stored twice"):
        CheckpointReader(sharded)
    # Mistral's own file is served where there is no other
    save_file({"c": torch.zeros(4)}, sharded / "consolidated.safetensors")
    (sharded / "left-over.safetensors").unlink()
    assert CheckpointReader(sharded).names() == ["a", "b"]
    for name in ("one", "two"):
        (sharded / f"{name}.safetensors").unlink()
    assert CheckpointReader(sharded).names() == ["c"]


def test_what_lies_beside_the_one_file_is_served_but_not_calibrated(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "one.safetensors").rename(sharded / "model.safetensors")
    assert CheckpointReader(sharded).names() == ["a"]
    assert CheckpointReader(sharded, quantised=True).names() == ["a", "b"]


def test_reader_names_a_truncated_shard(sharded: Path) -> None:
    path = sharded / "one.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"one\.safetensors: truncated"):
        CheckpointReader(sharded)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reader_names_file_and_tensor_of_a_nan(sharded: Path, value: float) -> None:
    save_file({"a": torch.tensor([1.0, value])}, sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"one\.safetensors: tensor 'a' holds NaN or Inf"):
        CheckpointReader(sharded).read("a")


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/passwd", "", "..", 3])
def test_reader_refuses_an_index_that_leaves_the_folder(sharded: Path, file: object) -> None:
    write_index(sharded, {"a": file})
    with pytest.raises(CheckpointError, match="'a' is said to lie in"):
        CheckpointReader(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [({}, "weight_map"), ([1], "weight_map"), ({"z": "one.safetensors"}, "'z' is missing")],
)
def test_reader_refuses_a_wrong_index(sharded: Path, weight_map, message) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(sharded)


def test_reader_refuses_quantised_tensors(sharded: Path) -> None:
    save_file({"a": torch.ones(2).to(torch.float8_e4m3fn)}, sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is F8_E4M3.*quantised already"):
        CheckpointReader(sharded).read("a")


TENSORS = {
    "x": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "x_scale": torch.rand(3, 1) + 0.1,
    "bias": torch.randn(7).to(torch.bfloat16),
    "blocks": torch.arange(9, dtype=torch.uint8),
}


def make_writer(output: Path, limit: int = 10**6, **options) -> CheckpointWriter:
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()]
    return CheckpointWriter(output, specs, limit, "id", **options)


def test_written_in_any_order_and_read_by_safetensors(tmp_path: Path) -> None:
    output = tmp_path / "out"
    writer = make_writer(output)
    for name in reversed(TENSORS):
        writer.write(name, TENSORS[name])
    assert not output.exists()
    writer.finish()
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    loaded = load_file(output / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())


def test_shards_close_before_the_limit(tmp_path: Path) -> None:
    output = tmp_path / "out"
    writer = make_writer(output, limit=28, state_bytes=1000)
    for name, tensor in TENSORS.items():
        writer.write(name, tensor)
    writer.finish()
    index = json.loads((output / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert {n for f in files for n in load_file(output / f)} == TENSORS.keys()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_writer_refuses_an_unusable_scale_by_name(tmp_path: Path, bad: float) -> None:
    writer = make_writer(tmp_path / "out")
    with pytest.raises(CheckpointError, match="'x_scale' holds a zero, negative or non-finite"):
        writer.write("x_scale", torch.tensor([[1.0], [bad], [1.0]]))


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    writer = make_writer(tmp_path / "out")
    with pytest.raises(CheckpointError, match="'x' is torch.float32"):
        writer.write("x", torch.zeros(3, 5))
    with pytest.raises(CheckpointError, match="no such tensor"):
        writer.write("y", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"'bias' is torch.bfloat16 \(8,\)"):
        writer.write("bias", torch.zeros(8, dtype=torch.bfloat16))


def test_resume_knows_what_is_done_and_ignores_a_cut_line(tmp_path: Path) -> None:
    output = tmp_path / "out"
    writer = make_writer(output)
    writer.write("x", TENSORS["x"])
    writer.done("x", {"weight_error": 0.5})
    with open(writer.state / "journal.jsonl", "a") as journal:
        journal.write('{"step": "bias", "fac')
    writer.close()
    again = make_writer(output, resume=True)
    assert again.steps == {"x": {"weight_error": 0.5}}
    for name in ("x_scale", "bias", "blocks"):
        again.write(name, TENSORS[name])
    again.finish()
    loaded = load_file(output / "model.safetensors")
    assert torch.equal(loaded["x"].float(), TENSORS["x"].float())


def test_without_resume_a_run_starts_over(tmp_path: Path) -> None:
    writer = make_writer(tmp_path / "out")
    writer.done("x", {})
    writer.close()
    assert make_writer(tmp_path / "out").steps == {}


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    writer = make_writer(tmp_path / "out")
    with pytest.raises(CheckpointError, match="another run is writing it"):
        make_writer(tmp_path / "out", resume=True)
    assert writer.partial.exists()


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = TensorSpec("huge", torch.float32, (10**9, 10**9))
    with pytest.raises(CheckpointError, match=r"--output=.*needs .* GB are free"):
        CheckpointWriter(tmp_path / "out", [spec], 10**9, "id")
    with pytest.raises(CheckpointError, match=r"--output=.*needs 1000000000.00 GB"):
        make_writer(tmp_path / "out", state_bytes=10**18)
    assert list(tmp_path.iterdir()) == []


def test_disk_full_surfaces_as_the_error_it_is(tmp_path: Path, monkeypatch) -> None:
    writer = make_writer(tmp_path / "out")
    (writer.partial / "model.safetensors").unlink()
    (writer.partial / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        writer.write("x", TENSORS["x"])
    assert error.value.errno in (errno.ENOSPC, errno.EINVAL, errno.ESPIPE)
    assert not (tmp_path / "out").exists()


def test_a_shard_may_fill_the_limit(tmp_path: Path) -> None:
    specs = [TensorSpec(name, torch.uint8, (8,)) for name in "abcd"]
    writer = CheckpointWriter(tmp_path / "out", specs, 16, "id")
    writer.close()
    sizes = [len(load_file(path)) for path in sorted(writer.partial.glob("*.safetensors"))]
    assert sizes == [2, 2]


def test_data_are_aligned_to_their_size(tmp_path: Path) -> None:
    """Readers map the file, and kernels load from it."""
    specs = [TensorSpec("n", torch.uint8, (3,)), TensorSpec("x" * 5, torch.float32, (2,))]
    writer = CheckpointWriter(tmp_path / "out", specs, 10**6, "id")
    writer.close()
    data = (writer.partial / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert start % 8 == 0 and header["x" * 5]["data_offsets"][0] % 4 == 0


def test_a_line_of_the_journal_holds_the_checksums_of_its_own_step(tmp_path: Path) -> None:
    writer = make_writer(tmp_path / "out")
    for name in ("x", "bias"):
        writer.write(name, TENSORS[name])
        writer.done(name, {})
    writer.close()
    lines = map(json.loads, (writer.state / "journal.jsonl").read_text().splitlines())
    assert [sorted(line["sums"]) for line in lines] == [["x"], ["bias"]]


def test_a_run_may_be_resumed_more_than_once(tmp_path: Path) -> None:
    for count, name in enumerate(("x", "bias", "blocks")):
        writer = make_writer(tmp_path / "out", resume=True)
        assert len(writer.steps) == count
        writer.write(name, TENSORS[name])
        writer.done(name, {})
        writer.close()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The disk, with 1 MB free."""
    disk = SimpleNamespace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    return disk


def test_outputs_on_one_disk_must_fit_together(tmp_path: Path, free: SimpleNamespace) -> None:
    check_places({tmp_path / "a": 6 * 10**5})
    with pytest.raises(CheckpointError, match=r"--output=.*b.*needs 0\.00 GB"):
        check_places({tmp_path / "a": 6 * 10**5, tmp_path / "b": 6 * 10**5})


def test_what_an_unfinished_run_holds_counts_as_free(tmp_path: Path, free: SimpleNamespace) -> None:
    specs = [TensorSpec("x", torch.uint8, (9 * 10**5,))]
    writer = CheckpointWriter(tmp_path / "out", specs, 10**9, "id")
    writer.write("x", torch.ones(9 * 10**5, dtype=torch.uint8))
    writer.done("x", {})
    writer.close()
    free.free = 10**5
    check_places({tmp_path / "out": 9 * 10**5})
    CheckpointWriter(tmp_path / "out", specs, 10**9, "id", resume=True).close()
    with pytest.raises(CheckpointError, match="GB are free"):
        check_places({tmp_path / "other": 9 * 10**5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_found_in_every_dtype(sharded: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.tensor([1.0, float("nan")]).to(dtype)}, sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match="'a' holds NaN or Inf"):
        CheckpointReader(sharded).read("a")


def test_a_number_too_large_for_a_float_is_refused(sharded: Path) -> None:
    (sharded / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e999}')
    with pytest.raises(CheckpointError, match=r"config\.json.*1e999 is no finite number"):
        CheckpointReader(sharded)


def test_a_shard_cut_inside_a_tensor_has_no_digest(sharded: Path) -> None:
    reader, path = CheckpointReader(sharded), sharded / "one.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"one\.safetensors.*ends inside tensor 'a'"):
        reader.digest()
