"""Read the pictures of a chat: data URLs to PIL images, within the server's limits.

Fetches nothing: a URL of another kind is refused, so a client cannot make the server read a file or
ask another machine. Formats are those of `FORMATS` alone, whatever else PIL could open. Called on
the encoder's thread.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

from cb_rollout.engine.images.processor import IMAGE_FAULTS
from cb_rollout.engine.images.prompt_images import DIGEST_BYTES
from cb_rollout.errors import error_text
from cb_rollout.server.errors import ApiError
from cb_rollout.server.options import ServerOptions

# Media types of a data URL, and PIL's names of their formats.
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}

DATA_URL = re.compile(r"data:([^,]*?)(;base64)?,", re.IGNORECASE)

WANTED = "send data:image/png;base64,... instead"


def with_pictures(
    messages: Sequence[dict[str, Any]], options: ServerOptions
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages whose parts of pictures are `{"type": "image", "image": PIL image}`.

    Returns:
        The messages; their pictures, in order.

    Raises:
        ApiError: a part is no data URL of a picture, or exceeds a limit; `param` names the part.
    """
    pictures: list[Any] = []
    found = []
    for at, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for number, part in enumerate(content):
            if part["type"] == "image_url":
                param = f"messages.{at}.content.{number}.image_url"
                if len(pictures) == options.max_images:
                    why = f"one picture more than the {options.max_images} of a request"
                    raise ApiError(400, f"{param}: {why} that are allowed.", param)
                pictures.append(_picture(part["image_url"]["url"], param, options))
                parts.append({"type": "image", "image": pictures[-1]})
            else:
                parts.append(part)
        found.append({**message, "content": parts})
    return found, pictures


def digest(picture: Any) -> bytes:
    """Return a hash of a picture's size and pixels."""
    pixels = f"{picture.size} ".encode() + picture.tobytes()
    return hashlib.blake2b(pixels, digest_size=DIGEST_BYTES).digest()


def _picture(url: str, param: str, options: ServerOptions) -> Any:
    """Return the first frame of a data URL's picture, turned and in RGB as `generate_batch` has it.

    Raises:
        ApiError: it is no such picture, or too large.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    def refuse(why: str) -> ApiError:
        return ApiError(400, f"{param}: {why}.", param)

    data = _data(url, options.max_image_bytes, refuse)
    try:
        picture = Image.open(io.BytesIO(data), formats=tuple(FORMATS.values()))
        width, height = picture.size
        # Asked before the pixels are decoded.
        if width * height > options.max_image_pixels:
            raise refuse(
                f"the picture has {width:,} x {height:,} pixels, and {options.max_image_pixels:,} "
                "are allowed; send a smaller one"
            )
        return load_image(picture)
    except (*IMAGE_FAULTS, Image.DecompressionBombError) as error:
        raise refuse(f"the picture cannot be read ({error_text(error)})") from error


def _data(url: str, max_bytes: int, refuse: Any) -> bytes:
    """Return the bytes of a data URL of a known media type."""
    heading = DATA_URL.match(url)
    if heading is None:
        scheme = re.match(r"[a-zA-Z][a-zA-Z0-9+.-]{0,20}:", url)
        named = f"{scheme[0].lower()} URLs are not fetched" if scheme else "this is no data URL"
        raise refuse(f"{named}; {WANTED}")
    media_type = heading[1].partition(";")[0].strip().lower()
    if media_type not in FORMATS:
        raise refuse(
            f"the media type {media_type!r:.60} is not one of {', '.join(FORMATS)}; {WANTED}"
        )
    if heading[2] is None:
        raise refuse(f"the data URL is not in base64; {WANTED}")
    # Four characters are three bytes.
    num_bytes = (len(url) - heading.end()) * 3 // 4
    if num_bytes > max_bytes:
        raise refuse(
            f"the picture has about {num_bytes:,} bytes, and {max_bytes:,} are allowed; send a "
            "smaller one"
        )
    try:
        return base64.b64decode(url[heading.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refuse(f"the data is not base64 ({error_text(error)})") from error
