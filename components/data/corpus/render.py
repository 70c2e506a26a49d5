"""Drawing a scene by casting rays: four rays a pixel, each with its own place of the light, so that shadows are soft.

Arrays of rays have shape [4, height, width] (the four of a pixel first) and are float32. Colours are linear until the
last step. Every shape is convex, so a ray meets it in one interval.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from components.data.corpus.scenes import Scene, Thing, View, draw_things, draw_view, facts, with_boxes

Array = np.ndarray
Vector = tuple[Array, Array, Array]  # x, y, z; each broadcasts with the rays
Window = tuple[slice, slice, slice]

PALETTE = {  # as displayed
    "gray": (88, 92, 98),
    "red": (205, 32, 38),
    "blue": (38, 76, 225),
    "green": (24, 132, 38),
    "brown": (128, 70, 24),
    "purple": (148, 40, 196),
    "cyan": (30, 205, 210),
    "yellow": (250, 226, 40),
}
SAMPLES = np.array([(-0.125, -0.375), (0.375, -0.125), (-0.375, 0.125), (0.125, 0.375)], dtype=np.float32)  # pixels
AMBIENT, DIRECT = np.float32(0.48), np.float32(0.85)  # light from everywhere, on what faces up; from the lamp
LIGHT_SPREAD = 0.07  # radians between the four places of the light and their middle
VISIBLE_SHARE = 0.55  # least part of a thing that must not be hidden
VISIBLE_PIXELS = 0.006  # least visible part of the picture for a thing
SCENE_TRIES = 400
COARSE = 3  # pixels of the picture to one of the first look


@dataclass(frozen=True)
class Hits:
    """What each ray meets: distance, surface normal, and the thing's index (-1: the ground)."""

    distance: Array  # [4, h, w]
    normal: Vector
    index: Array  # [4, h, w] int8


def _interval(thing: Thing, origin: Vector, ray: Vector) -> tuple[Array, Array, list[Array]]:
    """Where rays enter and leave a thing; enter >= leave where they miss.

    The third is the distances at which a ray enters each pair of faces (none for a sphere), from which the face that
    was met can be told.
    """
    radius = thing.radius
    if thing.kind.shape == "sphere":
        x, y, z = origin[0] - thing.x, origin[1] - thing.y, origin[2] - radius
        middle = -(ray[0] * x + ray[1] * y + ray[2] * z)
        inside = middle * middle - (x * x + y * y + z * z - radius * radius)
        half = np.sqrt(np.maximum(inside, 0))
        return middle - half, middle + half, []
    half_height = half_edge = _half(thing)
    cosine, sine = math.cos(thing.angle), math.sin(thing.angle)
    x, y, z = origin[0] - thing.x, origin[1] - thing.y, origin[2] - half_height
    if thing.kind.shape == "cylinder":
        flat = np.maximum(ray[0] * ray[0] + ray[1] * ray[1], 1e-12)
        middle = -(x * ray[0] + y * ray[1]) / flat
        inside = middle * middle - (x * x + y * y - _cylinder_radius(thing) ** 2) / flat
        half = np.sqrt(np.maximum(inside, 0))
        side_in, side_out = middle - half, middle + half
        top_in, top_out = _slab(z, ray[2], half_height)
        return np.maximum(side_in, top_in), np.minimum(side_out, top_out), [side_in, top_in]
    u_in, u_out = _slab(cosine * x + sine * y, cosine * ray[0] + sine * ray[1], half_edge)
    v_in, v_out = _slab(cosine * y - sine * x, cosine * ray[1] - sine * ray[0], half_edge)
    top_in, top_out = _slab(z, ray[2], half_height)
    enter = np.maximum(np.maximum(u_in, v_in), top_in)
    return enter, np.minimum(np.minimum(u_out, v_out), top_out), [u_in, v_in, top_in]


def _half(thing: Thing) -> float:
    """Half the height of a cube or cylinder, and half a cube's edge: its corners stay within the thing's circle."""
    return thing.radius * (0.73 if thing.kind.shape == "cube" else 0.8)


def _cylinder_radius(thing: Thing) -> float:
    return thing.radius * 0.78


def _slab(origin: Array, ray: Array, half: float) -> tuple[Array, Array]:
    """Where rays enter and leave the space between two planes at ±half."""
    safe = np.where(np.abs(ray) < 1e-7, np.float32(1e-7), ray)
    first, second = (-half - origin) / safe, (half - origin) / safe
    return np.minimum(first, second), np.maximum(first, second)


def _normal(thing: Thing, point: Vector, enter: Array, faces: list[Array], ray: Vector) -> Vector:
    """The outward surface normal where rays enter a thing."""
    if thing.kind.shape == "sphere":
        scale = np.float32(1 / thing.radius)
        return (point[0] - thing.x) * scale, (point[1] - thing.y) * scale, (point[2] - thing.radius) * scale
    top = (faces[-1] >= enter).astype(np.float32)
    up = top * np.where(ray[2] < 0, np.float32(1), np.float32(-1))
    side = 1 - top
    if thing.kind.shape == "cylinder":
        scale = np.float32(1 / _cylinder_radius(thing))
        return side * (point[0] - thing.x) * scale, side * (point[1] - thing.y) * scale, up
    cosine, sine = math.cos(thing.angle), math.sin(thing.angle)
    along_u = side * (faces[0] >= faces[1])
    along_v = side - along_u
    u = -along_u * np.sign(cosine * ray[0] + sine * ray[1])
    v = -along_v * np.sign(cosine * ray[1] - sine * ray[0])
    return cosine * u - sine * v, sine * u + cosine * v, up


def _rays(view: View, size: int) -> tuple[Vector, Vector]:
    """The camera's place and its rays' unit directions, each [4, size, size]."""
    cosine, sine = math.cos(view.elevation), math.sin(view.elevation)
    steps = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    right = (steps[None, None, :] + SAMPLES[:, 0, None, None] / size) / np.float32(view.zoom)
    down = (steps[None, :, None] + SAMPLES[:, 1, None, None] / size) / np.float32(view.zoom)
    right, down = np.broadcast_arrays(right, down)
    # forward is (0, cosine, -sine), up in the picture is (0, sine, cosine)
    length = np.sqrt(1 + right * right + down * down)
    ray = right / length, (cosine - down * sine) / length, (-sine - down * cosine) / length
    return _each(lambda axis: np.array(view.camera[axis], dtype=np.float32)), ray


def _window(thing: Thing, view: View, size: int, light: tuple[float, float, float] | None = None) -> Window:
    """The part of the picture outside of which no ray meets the thing or, given a light, the thing's shadow.

    A square about the thing's surrounding sphere; for the shadow, about that sphere and the place where the shadow
    ends, a little below the ground.
    """
    middle = thing.x, thing.y, thing.radius if thing.kind.shape == "sphere" else _half(thing)
    reach = thing.radius * 1.3
    places = [middle]
    if light is not None:
        reach += 3 * LIGHT_SPREAD  # the four places of the light differ
        length = middle[2] / light[2] + 1.2 * reach
        places.append((middle[0] - length * light[0], middle[1] - length * light[1], middle[2] - length * light[2]))
    cosine, sine = math.cos(view.elevation), math.sin(view.elevation)
    edges = []
    camera = view.camera
    for place in places:
        x, y, z = place[0] - camera[0], place[1] - camera[1], place[2] - camera[2]
        depth = y * cosine - z * sine
        right, down = 0.5 + view.zoom * x / depth, 0.5 - view.zoom * (y * sine + z * cosine) / depth
        half = 1.15 * view.zoom * reach / (depth - reach)
        edges.append((right - half, right + half, down - half, down + half))
    lefts, rights, tops, bottoms = zip(*edges, strict=True)
    rows = slice(max(0, math.floor(min(tops) * size)), max(0, math.ceil(max(bottoms) * size)))
    columns = slice(max(0, math.floor(min(lefts) * size)), max(0, math.ceil(max(rights) * size)))
    return slice(None), rows, columns


def trace(scene: Scene, size: int) -> tuple[Hits, list[int], Vector, Vector]:
    """What each ray meets, the pixels that each thing would have alone, and the rays."""
    origin, ray = _rays(scene.view, size)
    distance = -origin[2] / np.minimum(ray[2], np.float32(-1e-4))
    index = np.full(distance.shape, -1, dtype=np.int8)
    normal = (np.zeros_like(distance), np.zeros_like(distance), np.ones_like(distance))
    alone = []
    for number, thing in enumerate(scene.things):
        window = _window(thing, scene.view, size)
        part = ray[0][window], ray[1][window], ray[2][window]
        enter, leave, faces = _interval(thing, origin, part)
        met = enter < leave
        alone.append(_count(met))
        nearer = met & (enter < distance[window])
        point = origin[0] + enter * part[0], origin[1] + enter * part[1], origin[2] + enter * part[2]
        surface = _normal(thing, point, enter, faces, part)
        for axis in range(3):
            normal[axis][window][nearer] = surface[axis][nearer]
        distance[window][nearer] = enter[nearer]
        index[window][nearer] = number
    return Hits(distance, normal, index), alone, origin, ray


def _count(met: Array) -> int:
    """Pixels of which at least two of the four rays met the thing."""
    return int((met.sum(axis=0) >= 2).sum())


def mask(hits: Hits, number: int) -> Array:
    """The visible pixels of a thing, [h, w] bool: those of which at least two of the four rays met it."""
    visible: Array = (hits.index == number).sum(axis=0) >= 2
    return visible


def box_of(visible: Array) -> tuple[int, int, int, int]:
    """Left, top, width, height of the pixels that are set."""
    rows, columns = np.flatnonzero(visible.any(axis=1)), np.flatnonzero(visible.any(axis=0))
    left, top = int(columns[0]), int(rows[0])
    return left, top, int(columns[-1]) - left + 1, int(rows[-1]) - top + 1


def shade(scene: Scene, hits: Hits, origin: Vector, ray: Vector) -> Array:
    """The picture, [h, w, 3] uint8."""
    view, size = scene.view, hits.distance.shape[-1]
    point = _each(lambda axis: origin[axis] + hits.distance * ray[axis])
    light = _lights(view)
    start = _each(lambda axis: point[axis] + np.float32(0.01) * hits.normal[axis])  # off the surface's own shadow
    middle = float(light[0].mean()), float(light[1].mean()), float(light[2].mean())
    lit = np.ones(hits.distance.shape, dtype=np.float32)
    for thing in scene.things:
        window = _window(thing, view, size, middle)
        enter, leave, _ = _interval(thing, (start[0][window], start[1][window], start[2][window]), light)
        lit[window][(enter < leave) & (leave > 0)] = 0

    far = ((point[0] - view.pool[0]) ** 2 + (point[1] - view.pool[1]) ** 2) / np.float32(view.spread**2)
    bright = (AMBIENT + DIRECT * light[2] * lit) * (np.float32(0.35) + np.float32(0.65) / (1 + far))
    picture = bright[..., None] * np.array(view.ground, dtype=np.float32)
    things = hits.index >= 0
    picture[things] = _shade_things(
        scene,
        hits.index[things],
        height=point[2][things],
        normal=_each(lambda axis: hits.normal[axis][things]),
        ray=_each(lambda axis: ray[axis][things]),
        light=_each(lambda axis: np.broadcast_to(light[axis], things.shape)[things]),
        lit=lit[things],
    )
    display = np.sqrt(np.clip(picture.mean(axis=0), 0, 1)) * np.float32(255) + np.float32(0.5)
    pixels: Array = display.astype(np.uint8)
    return pixels


def _shade_things(
    scene: Scene, index: Array, *, height: Array, normal: Vector, ray: Vector, light: Vector, lit: Array
) -> Array:
    """Linear colours, [n, 3], where n rays meet things at some `height` above the ground; all arrays are [n].

    Rubber scatters (Lambert) and has a broad faint highlight. Metal scatters less, has a sharp highlight and mirrors
    a bright sky and the floor, which is the darker the nearer to the thing's foot.
    """
    facing = _dot(normal, light)
    scattered = AMBIENT - np.float32(0.13) * (1 - normal[2]) + DIRECT * np.maximum(facing, 0) * lit
    toward = 2 * _dot(normal, ray)
    mirror = _each(lambda axis: ray[axis] - toward * normal[axis])
    glint = np.maximum(_dot(mirror, light), 0) * (lit * (facing > 0))
    sky = np.clip(mirror[2] * np.float32(2.2) + np.float32(0.35), 0, 1)
    floor = np.maximum(height, 0) / np.maximum(-mirror[2], np.float32(0.15))
    reflected = 0.04 + np.float32(0.95) * np.maximum(sky * sky, np.float32(0.75) * floor / (floor + np.float32(0.7)))
    metal = np.array([thing.kind.material == "metal" for thing in scene.things])[index]
    colours = np.array([PALETTE[thing.kind.colour] for thing in scene.things], dtype=np.float32)
    body = np.where(metal, np.float32(0.35) * scattered + np.float32(0.95) * reflected, scattered)
    glint2 = glint * glint
    glint6 = glint2 * glint2 * glint2
    glint24 = glint6 * glint6 * glint6 * glint6
    white = np.where(metal, np.float32(0.95) * glint24 + np.float32(0.12) * sky, np.float32(0.05) * glint6)
    linear: Array = (colours / 255)[index] ** 2 * body[:, None] + white[:, None]
    return linear


def _each(part: Callable[[int], Array]) -> Vector:
    """A vector from its three components."""
    return part(0), part(1), part(2)


def _dot(first: Vector, second: Vector) -> Array:
    product: Array = first[0] * second[0] + first[1] * second[1] + first[2] * second[2]
    return product


def _lights(view: View) -> Vector:
    """Unit directions to the four places of the light, each [4, 1, 1]."""
    corners = np.array([(-1, -1), (1, 1), (1, -1), (-1, 1)], dtype=np.float32) * LIGHT_SPREAD
    azimuth = (view.light_azimuth + corners[:, 0]).reshape(4, 1, 1).astype(np.float32)
    elevation = (view.light_elevation + corners[:, 1]).reshape(4, 1, 1).astype(np.float32)
    flat = np.cos(elevation)
    return flat * np.sin(azimuth), -flat * np.cos(azimuth), np.sin(elevation)


def draw(
    name: str, split: str, rng: np.random.Generator, *, size: int, objects: tuple[int, int], captions: int
) -> tuple[Scene, Array]:
    """A scene in which everything can be told, and its picture, [size, size, 3] uint8.

    Layouts are drawn until each thing lies within the picture, shows enough of itself, and at least `captions` clear
    relations hold. Raises RuntimeError when none of many layouts does.
    """
    count = int(rng.integers(objects[0], objects[1] + 1))
    for _ in range(SCENE_TRIES):
        things = draw_things(rng, count)
        scene = Scene(name, split, things or (), draw_view(rng))
        if things is None or len(facts(scene, clear=True)) < captions:
            continue
        if _shows_all(trace(scene, size // COARSE), VISIBLE_SHARE - 0.1, 0) is None:
            continue  # most layouts fail, and a coarse look is cheap
        traced = trace(scene, size)
        masks = _shows_all(traced, VISIBLE_SHARE, VISIBLE_PIXELS * size * size)
        if masks is None:
            continue
        hits, _, origin, ray = traced
        pixels = [int(visible.sum()) for visible in masks]
        scene = with_boxes(scene, [box_of(visible) for visible in masks], pixels)
        return scene, shade(scene, hits, origin, ray)
    raise RuntimeError(f"no layout of {count} things found room in {SCENE_TRIES} tries")


def _shows_all(traced: tuple[Hits, list[int], Vector, Vector], share: float, pixels: float) -> list[Array] | None:
    """The visible pixels of each thing; None when one lies at the edge, or shows too few or too little of itself."""
    hits, alone, _, _ = traced
    masks = []
    for number, whole in enumerate(alone):
        visible = mask(hits, number)
        seen = int(visible.sum())
        if seen < pixels or seen < share * whole or _touches_edge(visible):
            return None
        masks.append(visible)
    return masks


def _touches_edge(visible: Array) -> bool:
    return bool(visible[0].any() or visible[-1].any() or visible[:, 0].any() or visible[:, -1].any())


def jpeg(picture: Array, quality: int) -> bytes:
    """JPEG bytes of a [h, w, 3] uint8 picture."""
    return encode(Image.fromarray(picture), quality)


def encode(picture: Image.Image, quality: int) -> bytes:
    """JPEG bytes, the same for the same pixels."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality, subsampling=0)
    return stream.getvalue()


def re_encode(data: bytes, *, quality: int, scale: float = 1.0) -> bytes:
    """The picture compressed again and, for `scale` other than 1, resized: the same to the eye, other bytes."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    if scale != 1.0:
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return encode(picture, quality)
