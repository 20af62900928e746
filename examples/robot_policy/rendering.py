"""Headless OpenGL for MuJoCo: finds EGL or OSMesa, and says what to install where there is neither."""

from __future__ import annotations

import os
import subprocess
import sys

DEBIAN_PACKAGES = ("libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libopengl0")
"""What EGL in software needs on Debian and Ubuntu; PyOpenGL, which MuJoCo calls it through, wants libopengl0."""

BACKENDS = ("egl", "osmesa")
"""In order of preference: EGL renders two to three times as fast as OSMesa in software."""

# A whole frame is rendered: libEGL.so can be present and still find no driver.
_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='.1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 8, 8)
renderer.update_scene(data)
renderer.render()
renderer.close()
"""


class NoRenderer(RuntimeError):
    """Neither EGL nor OSMesa renders a frame on this machine."""


def works(backend: str) -> bool:
    """Whether MuJoCo renders a frame with ``backend`` ("egl", "osmesa" or "glfw"), tried in a process of its own."""
    env = {**os.environ, "MUJOCO_GL": backend}
    env.pop("PYOPENGL_PLATFORM", None)
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], env=env, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def select_backend() -> str:
    """Choose the OpenGL backend and put it into ``MUJOCO_GL``; call it before ``mujoco`` is imported.

    A value that the user has set is left alone. The choice is inherited by child processes, so it is probed once.

    Returns:
        The name of the backend.

    Raises:
        NoRenderer: where no backend works; the message is one sentence that says what to type.
    """
    os.environ.setdefault("LP_NUM_THREADS", "1")  # software rendering: one thread, the other core is for training
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        return chosen
    for backend in BACKENDS:
        if works(backend):
            os.environ["MUJOCO_GL"] = backend
            return backend
    raise NoRenderer(
        "MuJoCo cannot render here because neither EGL nor OSMesa works; on Debian or Ubuntu type: "
        f"sudo apt-get install -y {' '.join(DEBIAN_PACKAGES)}"
    )
