"""Makes sure that MuJoCo can render without a display; run before the demo.

Finds EGL or OSMesa. Where both are missing and this is root on Debian or Ubuntu, installs them with apt-get; otherwise
stops with one sentence that says what to type.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from rendering import DEBIAN_PACKAGES, NoRenderer, select_backend


def install() -> None:
    """Install the software renderers with apt-get; raises ``CalledProcessError`` where apt-get fails."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=env, check=True)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *DEBIAN_PACKAGES]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Return 0 where a frame can be rendered, else print the remedy and return 1."""
    try:
        backend = select_backend()
    except NoRenderer as missing:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            print(missing, file=sys.stderr)
            return 1
        print(f"No headless OpenGL found; installing {' '.join(DEBIAN_PACKAGES)} with apt-get.", flush=True)
        try:
            install()
            backend = select_backend()
        except (subprocess.CalledProcessError, NoRenderer) as failed:
            print(f"{missing} (apt-get was tried here: {failed})", file=sys.stderr)
            return 1
    print(f"Rendering works: MUJOCO_GL={backend}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
