"""What compiled programs differ in by the version of jaxlib: each difference once, and where it was checked."""

from importlib.metadata import version

JAXLIB = tuple(int(part) for part in version("jaxlib").split(".")[:2])

SPLITS_FOURIER_TRANSFORMS = JAXLIB >= (0, 12)
"""Whether the partitioner transforms every device's own lines. With jaxlib 0.10.2 and 0.11.2 it gathers the array on
every device, whichever dim is split; with 0.12.0.1 only where the transform runs along the split dim."""

RESHARDS_SCANNED_STREAM = JAXLIB >= (0, 12)
"""Whether the partitioner moves a scanned residual stream that no constraint holds from batch to width, by a gather of
all of it: jaxlib 0.12.0.1 does, 0.10.2 does not."""

COMBINES_AS_STORED = JAXLIB == (0, 10)
"""Whether XLA:CPU combines sums into as few as `tests/predictions/kit.json.gz` has, which jaxlib 0.10.2 made. 0.12.0.1
leaves some of them apart, as the gradients of the two embedding tables: the bytes are the same, their number is not."""
