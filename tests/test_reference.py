"""The reference cache: found when nothing changed, recomputed when anything did, never silently wrong."""

import io
import os
import threading
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import make

from modeling.digest import weights_digest
from modeling.reference_cache import MAGIC, ReferenceCache


def data(key="tokens", n_responses=6):
    return SimpleNamespace(key=key, n_responses=n_responses)


class Notices(list):
    __call__ = list.append


def open_cache(folder, key="weights", notices=None, datasets=None, **options):
    notices = Notices() if notices is None else notices
    datasets = datasets or {"train": [data()], "eval": [data("held", 3)]}
    return ReferenceCache(str(folder), key, datasets, notices, **options)


def filled(folder, **options):
    cache = open_cache(folder, **options)
    cache.store("train", [(0, i) for i in range(6)], [-1.0 * i for i in range(6)])
    cache.store("eval", [(0, i) for i in range(3)], [-10.0 - i for i in range(3)])
    cache.save()
    return cache


def test_what_is_stored_is_found_again(tmp_path):
    filled(tmp_path)
    notices = Notices()
    cache = open_cache(tmp_path, notices=notices)
    found = cache.lookup("train", [(0, 4), (0, 0), (0, 4)])
    assert found.dtype == torch.float32 and found.tolist() == [-4.0, 0.0, -4.0]
    assert cache.lookup("eval", [(0, 2)]).tolist() == [-12.0]
    assert not notices


def test_a_missing_value_is_an_error_and_never_a_zero(tmp_path):
    cache = open_cache(tmp_path)
    cache.store("train", [(0, 1)], [-3.0])
    assert cache.has("train", [(0, 1)]) and not cache.has("train", [(0, 1), (0, 2)])
    with pytest.raises(KeyError, match=r"train.*\(0, 2\)"):
        cache.lookup("train", [(0, 1), (0, 2)])
    cache.save()
    with pytest.raises(KeyError):
        open_cache(tmp_path).lookup("train", [(0, 2)])
    assert open_cache(tmp_path).lookup("train", [(0, 1)]).tolist() == [-3.0]


def test_other_weights_or_tokens_find_nothing(tmp_path):
    filled(tmp_path)
    assert not open_cache(tmp_path, key="other weights").has("train", [(0, 0)])
    assert not open_cache(tmp_path, datasets={"train": [data("other tokens")]}).has("train", [(0, 0)])
    assert open_cache(tmp_path, datasets={"train": [data("new"), data()]}).has("train", [(1, 0)])  # in any mixture


def test_splits_and_data_sets_stay_apart(tmp_path):
    cache = open_cache(tmp_path, datasets={"train": [data("a"), data("b")], "eval": [data("c")]})
    cache.store("train", [(1, 2)], [-5.0])
    assert cache.has("train", [(1, 2)]) and not cache.has("train", [(0, 2)]) and not cache.has("eval", [(0, 2)])


def test_two_jobs_complete_each_other(tmp_path):
    one, two = open_cache(tmp_path), open_cache(tmp_path)
    one.store("train", [(0, 0), (0, 1)], [-1.0, -2.0])
    two.store("train", [(0, 2)], [-3.0])
    one.save()
    two.save()
    assert two.lookup("train", [(0, 0), (0, 1), (0, 2)]).tolist() == [-1.0, -2.0, -3.0]
    assert open_cache(tmp_path).lookup("train", [(0, 0), (0, 1), (0, 2)]).tolist() == [-1.0, -2.0, -3.0]


def test_what_is_forgotten_stays_forgotten(tmp_path):
    cache = filled(tmp_path)
    cache.forget()
    assert not cache.has("train", [(0, 0)]) and not cache.has("eval", [(0, 0)])
    cache.store("train", [(0, 3)], [-9.0])
    cache.save()
    for one in (cache, open_cache(tmp_path)):
        assert one.lookup("train", [(0, 3)]).tolist() == [-9.0]
        assert not one.has("train", [(0, 0)]) and not one.has("eval", [(0, 0)])


def test_wrong_values_that_cannot_be_removed_are_not_read_again(tmp_path, monkeypatch):
    cache = filled(tmp_path, notices=(notices := Notices()))

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refuse)
    cache.forget()
    cache.store("train", [(0, 3)], [-9.0])
    cache.save()
    assert cache.known("train")[0].tolist() == [False] * 3 + [True] + [False] * 2
    assert len(notices) == 1 and "wrong values (Read-only" in notices[0] and "reference.cache_dir" in notices[0]


def test_of_two_values_the_first_that_was_written_stays(tmp_path):
    one, two = open_cache(tmp_path), open_cache(tmp_path)
    one.store("train", [(0, 0), (0, 1)], [-1.0, -2.0])
    one.store("train", [(0, 1)], [-2.5])
    two.store("train", [(0, 1), (0, 2)], [-2.25, -3.0])
    one.save()
    two.save()
    one.save()
    assert one.lookup("train", [(0, 0), (0, 1), (0, 2)]).tolist() == [-1.0, -2.0, -3.0]
    assert two.lookup("train", [(0, 0), (0, 1), (0, 2)]).tolist() == [-1.0, -2.0, -3.0]


def test_only_the_writer_writes(tmp_path):
    filled(tmp_path, writer=False)
    assert not list(tmp_path.rglob("*.logps"))
    filled(tmp_path, writer=True)
    assert open_cache(tmp_path, writer=False).has("train", [(0, 0)])


def test_without_a_folder_values_stay_in_memory():
    cache = ReferenceCache(None, "weights", {"train": [data()]}, pytest.fail)
    cache.store("train", [(0, 0)], [-1.0])
    cache.save()
    assert cache.lookup("train", [(0, 0)]).tolist() == [-1.0]


# ---- Files that are not what they should be


def file_of(folder, key="tokens"):
    return folder / "weights" / f"{key}.logps"


def write_file(path, body):
    path.write_bytes(MAGIC + zlib.crc32(body).to_bytes(4, "big") + body)


def check_refused(folder):
    notices = Notices()
    cache = open_cache(folder, notices=notices)
    assert not cache.has("train", [(0, 0)])
    assert len(notices) == 1 and str(file_of(folder)) in notices[0] and "anew" in notices[0]
    assert cache.has("eval", [(0, 0)])  # the other file is still good
    cache.store("train", [(0, i) for i in range(6)], [-1.0] * 6)
    cache.save()
    notices.clear()
    assert open_cache(folder, notices=notices).has("train", [(0, i) for i in range(6)]) and not notices


@pytest.mark.parametrize("keep", [0, 1, len(MAGIC), len(MAGIC) + 2, len(MAGIC) + 4, len(MAGIC) + 30, -4, -1])
def test_a_truncated_file_is_recomputed(tmp_path, keep):
    filled(tmp_path)
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    check_refused(tmp_path)


def test_any_flipped_bit_is_found(tmp_path):
    filled(tmp_path)
    path = file_of(tmp_path)
    content = path.read_bytes()
    for place in range(len(content)):
        broken = bytearray(content)
        broken[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(broken))
        notices = Notices()
        assert not open_cache(tmp_path, notices=notices).has("train", [(0, 0)]) and notices, place


def test_a_file_with_bytes_appended_is_recomputed(tmp_path):
    filled(tmp_path)
    with open(file_of(tmp_path), "ab") as file:
        file.write(b"x")
    check_refused(tmp_path)


@pytest.mark.parametrize("values", [np.zeros(5, np.float32), np.zeros((6, 1), np.float32), np.zeros(6, np.float64)])
def test_another_shape_or_type_is_recomputed(tmp_path, values):
    filled(tmp_path)
    np.save(body := io.BytesIO(), values)
    write_file(file_of(tmp_path), body.getvalue())
    check_refused(tmp_path)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_values_are_recomputed(tmp_path, value):
    filled(tmp_path)
    np.save(body := io.BytesIO(), np.array([-1, value, -3, -4, -5, -6], np.float32))
    write_file(file_of(tmp_path), body.getvalue())
    check_refused(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    file_of(tmp_path).mkdir(parents=True)
    cache = filled(tmp_path, notices=(notices := Notices()))
    assert len(set(notices)) == 2 and all(str(tmp_path) in notice for notice in notices)
    assert cache.has("train", [(0, 5)])


@pytest.mark.parametrize("body", [b"", b"not an array", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_a_sound_checksum_over_nonsense_is_recomputed(tmp_path, body):
    filled(tmp_path)
    write_file(file_of(tmp_path), body)
    check_refused(tmp_path)


def test_another_versions_file_is_recomputed(tmp_path):
    filled(tmp_path)
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"log-probs 1", b"log-probs 2"))
    check_refused(tmp_path)


# ---- Folders that cannot be written


def check_kept_in_memory(cache, notices):
    assert cache.lookup("train", [(0, i) for i in range(6)]).tolist() == [-1.0 * i for i in range(6)]
    assert len(notices) == 1 and "cannot be written" in notices[0] and "reference.cache_dir" in notices[0]
    cache.store("train", [(0, 0)], [-8.0])
    cache.save()  # no second complaint
    assert len(notices) == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    notices = Notices()
    check_kept_in_memory(filled(tmp_path / "file" / "cache", notices=notices), notices)


def test_a_read_only_folder(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)  # root may write anywhere, whatever a folder's mode
    notices = Notices()
    check_kept_in_memory(filled(tmp_path, notices=notices), notices)
    assert "Read-only file system" in notices[0]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch, function):
    filled(tmp_path)
    before = file_of(tmp_path).read_bytes()
    cache = open_cache(tmp_path, notices=(notices := Notices()), datasets={"train": [data(), data("new", 2)]})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    cache.store("train", [(1, 0)], [-1.0])
    cache.save()
    check_kept_in_memory(cache, notices)
    assert file_of(tmp_path).read_bytes() == before
    assert sorted(os.listdir(tmp_path / "weights")) == ["held.logps", "tokens.logps"]  # nothing half-written


def test_many_jobs_at_once_never_leave_a_broken_file(tmp_path):
    notices, problems = Notices(), []

    def job(number):
        try:
            for _ in range(15):
                cache = open_cache(tmp_path, notices=notices, datasets={"train": [data(n_responses=5000)]})
                keys = [(0, i) for i in range(number, 5000, 4)]
                cache.store("train", keys, [float(i) for _, i in keys])
                cache.save()
                values = cache.values["train"][0]
                known = ~np.isnan(values)
                assert (values[known] == np.arange(5000)[known]).all()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and not notices
    values = open_cache(tmp_path, notices=notices, datasets={"train": [data(n_responses=5000)]}).values["train"][0]
    assert not notices and not np.isnan(values).all()
    assert os.listdir(tmp_path / "weights") == ["tokens.logps"]


# ---- The key


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)))
        self.cube = torch.nn.Parameter(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)))
        self.vector = torch.nn.Parameter(torch.zeros(3))
        self.number = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_digest_changes_with_any_single_weight(dtype):
    model = Small().to(dtype)
    seen = {weights_digest(model)}
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(-1).view(integer)
            for index in range(len(bits)):
                bits[index] ^= 1  # the least change there is
                seen.add(weights_digest(model))
                bits[index] ^= 1
    assert len(seen) == 1 + sum(p.numel() for p in model.parameters())
    assert weights_digest(model) in seen and weights_digest(Small().to(dtype)) in seen


def test_digest_sees_weights_that_change_places():
    model = Small()
    first = weights_digest(model)
    with torch.no_grad():
        model.matrix.copy_(model.matrix.flip(0))
    second = weights_digest(model)
    with torch.no_grad():
        model.matrix.copy_(model.matrix.flip(1))
    assert len({first, second, weights_digest(model)}) == 3


def test_digest_tells_sign_of_zero_shape_name_and_precision():
    model, signed, renamed = Small(), Small(), Small()
    signed.vector.data.neg_()
    renamed.vektor = renamed.vector
    del renamed.vector
    reshaped = Small()
    reshaped.matrix.data = reshaped.matrix.data.reshape(7, 5)
    assert len({weights_digest(m) for m in (model, signed, renamed, reshaped, Small().to(torch.bfloat16))}) == 5


def test_digest_is_of_weights_alone():
    model = make("llama_tied")
    first = weights_digest(model)
    model.train()
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    model.requires_grad_(False)
    assert weights_digest(model) == first == weights_digest(make("llama_tied"))
    assert weights_digest(make("llama_tied", seed=1)) != first


def test_digest_of_strided_weights_is_of_their_values():
    model, transposed = Small(), Small()
    transposed.matrix.data = transposed.matrix.data.T.contiguous().T
    assert weights_digest(model) == weights_digest(transposed)
