"""Pictures among texts: files, encoded bytes or images, which Pillow opens when their pixels are needed."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from PIL.Image import Image

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation: the content of a message is a text, or a list of parts of which some are pictures."""

PLACE = "<image>"
"""A picture's place in a text of a prompt that has pictures, as in many datasets."""

FIRST_PICTURE_ID = 2**30
"""The first id of a picture token. No vocabulary reaches it, and as many ids follow it below the limit of int32."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # No EPS, for which Pillow starts another program.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # Of EXIF.


class Picture:
    """A picture of a prompt. Pictures with the same content are equal, and are one for the policy.

    Args:
        source: The path of a file, the content of one, an image of Pillow, or a cell of `datasets.Image`
            (``{"bytes": …, "path": …}``).
        place: Where it comes from, such as a file and a line, for messages.
        folder: The folder from which a relative path starts.

    Attributes:
        held: What a policy keeps of the picture for as long as a prompt has it.

    Raises:
        ValueError: If it is a URL, which is never fetched, a file that is not there, or none of the above.
    """

    def __init__(self, source: object, place: str = "a prompt", folder: Path | None = None) -> None:
        self.place = place
        self.held: object = None
        if isinstance(source, Mapping):
            source = source.get("path") if source.get("bytes") is None else source["bytes"]
        if isinstance(source, str):
            if re.match(r"[a-zA-Z][\w+.-]*://|data:", source):
                raise self.refusal(f"be in a file, but got the URL {source[:80]!r}, which is never fetched")
            source = (folder or Path()) / Path(source).expanduser()
        if isinstance(source, Path):
            if not source.is_file():
                raise self.refusal(f"be a file, but there is no {str(source)!r}")
        elif not isinstance(source, bytes) and not is_image(source):
            raise self.refusal(f"be a path, bytes or an image of Pillow, but got {type(source).__name__}")
        self.source: Any = source
        self._digest = b""

    @property
    def digest(self) -> bytes:
        """16 bytes that say what the picture is: a hash of its file or, for an image of Pillow, of its pixels."""
        if not self._digest:
            content = self.source if is_image(self.source) else self._bytes()
            if not isinstance(content, bytes):
                turned = content.size, content.getexif().get(_ORIENTATION)
                content = repr(turned).encode() + content.convert("RGBA").tobytes()
            self._digest = hashlib.blake2b(content, digest_size=16).digest()
        return self._digest

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, of which the header of a file tells."""
        with self._opened() as image:
            sideways = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
            return (image.height, image.width) if sideways else image.size

    def open(self) -> Image:
        """The picture upright and in RGB, as Transformers' `load_image` gives it; an error if it cannot be read."""
        from PIL import ImageOps

        with self._opened() as image:
            return ImageOps.exif_transpose(image).convert("RGB")

    def _bytes(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @contextmanager
    def _opened(self) -> Iterator[Image]:
        """The image, whose pixels are not read yet; what Pillow says of them inside the context becomes one line."""
        from PIL import Image, UnidentifiedImageError

        has_image = is_image(self.source)
        try:
            image = self.source.copy() if has_image else Image.open(io.BytesIO(self._bytes()), formats=_FORMATS)
            most = Image.MAX_IMAGE_PIXELS
            if most is not None and image.width * image.height > most:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} exceed the limit of {most} pixels")
            yield image
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise self.refusal(f"be small, but got what could be a decompression bomb ({error})") from None
        except UnidentifiedImageError:
            drawn = " (an SVG is not drawn: save it as PNG)" if b"<svg" in self._bytes()[:1000] else ""
            raise self.refusal(f"be one of {', '.join(_FORMATS)}, but is not{drawn}") from None
        except Exception as error:  # Pillow's decoders raise many types.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise self.refusal(f"be whole, but its pixels cannot be read ({reason})") from None

    def refusal(self, reason: str) -> ValueError:
        """The error about a picture that cannot be used: what it must be, and is not."""
        source = getattr(self, "source", None)
        name = f" {source}" if isinstance(source, Path) else ""
        return ValueError(f"{self.place}: the picture{name} must {reason}.")

    def __deepcopy__(self, memo: object) -> Picture:
        return self  # Nothing changes it.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:  # A part of the identity of a problem.
        return f"<picture {self.digest.hex()[:16]}>"


def is_image(value: object) -> TypeGuard[Image]:
    """Whether a value is an image of Pillow."""
    if type(value).__module__.partition(".")[0] in ("builtins", "pathlib"):  # Without an import of Pillow.
        return False
    from PIL.Image import Image

    return isinstance(value, Image)


def pictures_in(messages: Messages | str) -> list[Picture]:
    """The pictures of a prompt in their order."""
    return [part["image"] for part in _parts(messages) if isinstance(part.get("image"), Picture)]


def has_pictures(messages: Messages | str) -> bool:
    """Whether a prompt has a picture or a place for one."""
    return any(part.get("type") == "image" for part in _parts(messages))


def _parts(messages: Messages | str) -> Iterator[dict[str, Any]]:
    for message in [] if isinstance(messages, str) else messages:
        yield from message["content"] if isinstance(message["content"], list) else []


def in_parts(messages: Messages) -> Messages:
    """The messages with every content as a list of parts, which templates for pictures expect."""
    return [message | {"content": _as_parts(message["content"])} for message in messages]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else _text_part(content)


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def with_pictures(
    messages: Messages | str, cells: Sequence[object], place: str, folder: Path | None = None
) -> Messages | str:
    """The messages with pictures at their places: parts ``{"type": "image"}``, or `PLACE` in the texts.

    Without places the pictures come first in the first turn of the user, as in TRL. A part may also name its own
    picture, ``{"type": "image", "image": …}``. Each of the `cells` has a form that `Picture` takes; `place` and
    `folder` are its arguments. An error if there are more or fewer places than pictures.
    """
    if isinstance(messages, str):
        if not cells:
            return messages
        raise ValueError(f"{place}: pictures need a prompt that is a conversation, but got plain text.")
    whole, cell_iterator = messages, iter(cells)
    messages = [message | {"content": _split(message["content"])} for message in whole]
    if not cells and not has_pictures(messages):
        return whole
    open_places = [part for part in _parts(messages) if part["type"] == "image" and part.get("image") is None]
    if not open_places and cells:
        first = next((message for message in messages if message.get("role") == "user"), messages[0])
        open_places = [{"type": "image"} for _ in cells]
        first["content"] = [*open_places, *first["content"]]
    if len(open_places) != len(cells):
        raise ValueError(
            f"{place}: a prompt must have a place for each picture, but got {len(cells)} pictures and "
            f"{len(open_places)} places ({PLACE} or a part of type image)."
        )
    for part in _parts(messages):
        if part["type"] == "image":
            cell = next(cell_iterator) if part.get("image") is None else part["image"]
            part["image"] = cell if isinstance(cell, Picture) else Picture(cell, place, folder)
    return messages


def _split(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of a content in parts, with a part of type image for each `PLACE` in the texts."""
    parts: list[dict[str, Any]] = []
    for part in _as_parts(content):
        if part.get("type") != "text":
            parts.append(dict(part))
            continue
        for number, text in enumerate(part["text"].split(PLACE)):
            parts += [{"type": "image"}] * bool(number) + _text_part(text)
    return [dict(part) for part in parts]


def add_text(content: str | list[dict[str, Any]], text: str) -> Any:
    """A content of a message with a text at its end."""
    if isinstance(content, str):
        return content + text
    if content and content[-1].get("type") == "text":
        return [*content[:-1], content[-1] | {"text": content[-1]["text"] + text}]
    return [*content, *_text_part(text)]


def as_text(content: object) -> str:
    """A content of a message as people read it, with `PLACE` for its pictures."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part.get("type") == "text" else PLACE for part in content)


class PictureEncoder(Protocol):
    """What writes the token ids of a prompt with pictures; a policy that takes pictures has one.

    Attributes:
        place: The text that stands for a picture.
        processor: The Transformers processor of the model.
    """

    place: str
    processor: Any

    def expand(self, text: str, pictures: Sequence[Picture], *, begins: bool = True) -> list[int]:
        """The token ids of a text in which each place becomes the tokens of its picture, with the id of the place."""
        ...

    def name(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The ids from `expand` with an id of its own for each picture token."""
        ...
