"""An environment whose tool draws on the picture of the prompt, and shows it again."""

from __future__ import annotations

from PIL import Image, ImageDraw


class Marker:
    """A sheet on which the policy marks what it looks at."""

    def reset(self, images: list[Image.Image], **row: object) -> None:
        """Begin with the first picture of the prompt, which is this rollout's own copy."""
        self.sheet = images[0]

    def box(self, left: int, top: int, right: int, bottom: int) -> list[str | Image.Image]:
        """Draw a red box on the picture.

        Args:
            left: Pixels from the left.
            top: Pixels from the top.
            right: Pixels from the left, more than `left`.
            bottom: Pixels from the top, more than `top`.
        """
        if not (0 <= left < right < self.sheet.width and 0 <= top < bottom < self.sheet.height):
            raise ValueError(f"a box must lie within {self.sheet.width} x {self.sheet.height} pixels")
        ImageDraw.Draw(self.sheet).rectangle((left, top, right, bottom), outline=(220, 0, 0))
        return ["The picture now: ", self.sheet]
