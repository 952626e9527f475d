"""Pictures of a row: paths, relative to the folder of the input, or data URLs.

Owns their checks before a model loads, and the place where each is found. Decodes no pixels.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cb_rollout.engine.images.processor import image_parts, is_chat, picture_of, with_image_parts

DATA_URL = "data:"


def image_names(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what names the pictures of a row: of `images`, then of its chat's parts."""
    yield from row.get("images") or ()
    for chat in (row.get("prompt"), row.get("messages")):
        named = map(picture_of, image_parts(chat) if is_chat(chat) else ())
        yield from (name for name in named if name is not None)


def problem_of_images(row: Mapping[str, Any], folder: Path) -> str | None:
    """Return the reason why a row's pictures cannot be used; None: they can."""
    images = row.get("images")
    if images is not None and not isinstance(images, list):
        return "has images that are not a list"
    for name in image_names(row):
        if not isinstance(name, str):
            return f"has the image {name!r:.80}, which is not a path"
        if name.startswith(DATA_URL):
            continue
        if "://" in name:
            return f"has the image {name!r:.80}, which is a URL; download it, and give its path"
        if not (folder / name).is_file():
            return f"has the image {name!r:.80}, which is not a file in {folder}"
    return None


def image_digests(row: Mapping[str, Any], folder: Path, known: dict[str, str]) -> list[str]:
    """Return the digest of each picture that is a file.

    Args:
        row: names the pictures.
        folder: that their paths are relative to.
        known: digests by name, of files that were read before; those read now are added.
    """
    names = [name for name in image_names(row) if not name.startswith(DATA_URL)]
    for name in names:
        if name not in known:
            with (folder / name).open("rb") as file:
                known[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return [known[name] for name in names]


def located(name: str, folder: Path) -> str:
    """Return a picture's path from the working directory, or its data URL."""
    return name if name.startswith(DATA_URL) else str(folder / name)


def located_in_chat(chat: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return a chat whose parts name their pictures from the working directory."""

    def located_part(part: Mapping[str, Any]) -> dict[str, Any]:
        name = picture_of(part)
        return {"type": "image"} | ({} if name is None else {"image": located(name, folder)})

    return with_image_parts(chat, located_part)
