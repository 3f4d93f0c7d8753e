"""Compiled programs are in the cache folder, unless the user has selected another or none."""

import logging
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest

from magicjax import compilation_cache
from pallas_kernels.cpu import build

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def enabled(monkeypatch, tmp_path):
    """Returns a function that enables the cache and returns the changed settings of JAX."""
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path))
    monkeypatch.delenv(compilation_cache.SWITCH, raising=False)

    def enable(user=None, **given) -> dict:
        found = {}
        settings = {name: default for name, default, _ in compilation_cache.SETTINGS} | given
        config = types.SimpleNamespace(
            jax_compilation_cache_dir=user,
            update=lambda name, value: found.update({name: value}),
            **settings,
        )
        monkeypatch.setattr(compilation_cache, "jax", types.SimpleNamespace(config=config))
        compilation_cache.enable.__wrapped__()
        return found

    return enable


def test_programs_are_in_a_folder_of_the_processor_and_the_kernels(enabled, tmp_path, monkeypatch):
    first = enabled()
    folder = first["jax_compilation_cache_dir"]
    assert folder.startswith(str(tmp_path / "programs"))
    assert first["jax_compilation_cache_max_size"] == 2e9
    assert enabled() == first
    monkeypatch.setattr(build, "processor", lambda: "another one")
    assert enabled()["jax_compilation_cache_dir"] != folder


def test_settings_of_the_user_are_kept(enabled):
    assert "jax_compilation_cache_max_size" not in enabled(jax_compilation_cache_max_size=5)


def test_other_sources_of_the_kernels_have_another_folder(enabled, tmp_path, monkeypatch):
    folder = enabled()["jax_compilation_cache_dir"]
    sources = tmp_path / "sources"
    sources.mkdir()
    for file in build.FOLDER.glob("*.[ch]*"):
        shutil.copy(file, sources)
    monkeypatch.setattr(build, "FOLDER", sources)
    assert enabled()["jax_compilation_cache_dir"] == folder
    (sources / "simd.h").write_text("// changed")
    assert enabled()["jax_compilation_cache_dir"] != folder


def test_a_folder_that_the_user_selected_and_off_change_nothing(enabled, monkeypatch):
    assert enabled(user="/somewhere") == {}
    monkeypatch.setenv(compilation_cache.SWITCH, "off")
    assert enabled() == {}


def test_an_unknown_setting_names_the_known_ones(enabled, monkeypatch):
    monkeypatch.setenv(compilation_cache.SWITCH, "no")
    with pytest.raises(ValueError, match=r"MAGICJAX_PROGRAM_CACHE='no' is unknown: use 'on'"):
        enabled()


def test_a_folder_that_cannot_be_written_is_a_warning(enabled, monkeypatch, caplog):
    monkeypatch.setenv("MAGICJAX_CACHE", "/dev/null/cache")
    with caplog.at_level(logging.WARNING, "magicjax"):
        assert enabled() == {}
    assert "every process compiles its programs" in caplog.text
    assert "set MAGICJAX_CACHE to a writable folder" in caplog.text


@pytest.mark.slow
def test_the_next_process_reads_the_programs_of_the_first(directory, tmp_path):
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"MAGICJAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment[build.SWITCH] = "off"  # the kernels would be compiled in the same folder
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    arguments = ["--target", str(directory), "--prompt", "abc", "--max-tokens", "4"]
    command = [sys.executable, "-m", "magicjax", "generate", *arguments]
    stored, texts = [], []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        stored.append({path.name for path in tmp_path.rglob("*-cache")})
    assert texts[0] == texts[1] and stored[0] == stored[1]
    assert {name.split("-")[0] for name in stored[0]} >= {
        "jit_prefill",
        "jit_init_state",
        "jit_decode",
    }
