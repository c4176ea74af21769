"""The named adapters of a server, and loading and unloading them on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from meshwright.errors import MeshwrightError
from meshwright.serving.engine.adapters import AdapterTable, Factors
from meshwright.serving.engine.request import Adapter, ClosedError
from meshwright.serving.http.errors import ApiError, from_engine_error


class AdapterEngine(Protocol):
    """The part of an engine that loads adapters."""

    adapters: AdapterTable

    def load_adapter(self, name: str, factors: Factors) -> None:
        """Load an adapter whose weights `adapters.read` returned."""
        ...


class ServedAdapters:
    """The adapters that requests can use by name, and those that requests may load.

    Args:
        engine: the engine.
        folder: the directory that contains all adapters that requests may load; None if requests may not load or unload
            adapters.
    """

    def __init__(self, engine: AdapterEngine, folder: Path | None) -> None:
        self._engine, self._folder = engine, folder
        # One at a time, because an adapter is in memory while it is read.
        self._thread = ThreadPoolExecutor(1, "adapters")

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        """The loaded adapters, by name."""
        return self._engine.adapters.by_name

    async def change(self, change: Callable[[Path], None]) -> None:
        """Call `change`, which loads or unloads an adapter, in a thread. Its argument is the folder of adapters.

        Raises:
            ApiError: requests may not load adapters, or the function raises a `MeshwrightError`.
        """
        if self._folder is None:
            raise adapters_fixed()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, change, self._folder.resolve())
        except MeshwrightError as error:
            raise (from_engine_error(error) if isinstance(error, ClosedError) else ApiError(str(error))) from None

    def load(self, name: str, path: str, folder: Path) -> None:
        """Load an adapter under a name. path: its directory inside the folder, relative or absolute."""
        directory = folder if "\0" in path else (folder / path).resolve()
        if directory == folder or not directory.is_relative_to(folder):
            raise ApiError(
                f"lora_path is {path[:200]!r}, outside the directory from which this server loads adapters",
                status=403, param="lora_path", code="path_not_allowed",
            )  # fmt: skip
        self._engine.load_adapter(name, self._engine.adapters.read(name, directory))

    def unload(self, name: str, _: Path) -> None:
        """Unload an adapter; open requests that use it are still answered."""
        if name not in self.by_name:
            names = ", ".join(map(repr, self.by_name)) or "none"
            raise ApiError(
                f"there is no adapter {name[:100]!r}; loaded are {names}",
                status=404, param="lora_name", code="model_not_found",
            )  # fmt: skip
        self._engine.adapters.drop(name)


def adapters_fixed() -> ApiError:
    """Return the error for a request to change the adapters of a server that does not allow it."""
    return ApiError(
        "requests may not load or unload adapters of this server; start it with --adapter-folder",
        status=403, code="adapters_fixed",
    )  # fmt: skip
