"""Meta-World as this example uses it: seeded, seen by a camera, with its scripted experts.

What the raw simulator does that a policy on images must not meet, and what is done about it here:

* ``env.reset(seed=...)`` ignores the seed. The environment's own ``seed`` is used, with a new goal at every reset.
* Goals are hidden by clipping the observation space, which also blinds the scripted experts. It is lifted.
* Goal markers are drawn into the picture. They are not rendered.
* Shadows, reflections and multisampling cost ten times the rest in a software renderer. They are off.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rendering import select_backend

select_backend()  # mujoco reads MUJOCO_GL once, when it is imported

import mujoco  # noqa: E402
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402
from metaworld.policies import ENV_POLICY_MAP  # noqa: E402

# The scripted experts ask for more than an action can be; the environment clips it, as it should.
warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")

CAMERA = "corner3"
IMAGE_SIZE = 96
PICTURE_SIZE = 256
STATE_SIZE = 4
ACTION_SIZE = 4


@dataclass(frozen=True)
class Observation:
    """What the policy may see.

    Attributes:
        image: uint8, (96, 96, 3), RGB.
        state: float32, (4,): the hand's x, y, z in metres and how far the gripper is open.
    """

    image: NDArray[np.uint8]
    state: NDArray[np.float32]


@dataclass(frozen=True)
class Demonstration:
    """One successful episode of a scripted expert.

    Attributes:
        images: uint8, (frames, 96, 96, 3): every ``stride``-th step.
        steps: int64, (frames,): the step each image belongs to.
        states: float32, (length, 4).
        actions: float32, (length, 4), the expert's own actions, in [-1, 1].
    """

    images: NDArray[np.uint8]
    steps: NDArray[np.int64]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]


class MetaWorldTask:
    """One Meta-World task with a camera; a context manager, because a renderer must be closed explicitly."""

    def __init__(self, name: str) -> None:
        if name not in ALL_V3_ENVIRONMENTS:
            raise ValueError(f"expected a Meta-World task such as 'button-press-v3', got {name!r}")
        self.name = name
        self._expert = ENV_POLICY_MAP[name]()
        env: Any = ALL_V3_ENVIRONMENTS[name]()
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)  # cached with the goal clipped to zero
        env.model.vis.quality.shadowsize = 0
        env.model.vis.quality.offsamples = 0
        self._env = env
        self._renderers: dict[int, mujoco.Renderer] = {}
        self._options = mujoco.MjvOption()
        self._options.sitegroup[:] = 0  # goal markers are sites
        self._raw: NDArray[np.float64] = np.empty(0)

    def reset(self, seed: int) -> Observation:
        """Start the episode that belongs to ``seed``: the object's and the hand's places follow from it alone."""
        self._env.seed(seed)
        self._raw, _ = self._env.reset()
        self._env.curr_path_length = 0
        return self.observe()

    def step(self, action: NDArray[np.floating[Any]]) -> bool:
        """Apply one action, (4,), clipped to [-1, 1]; returns whether the task counts as solved in this step."""
        self._raw, _, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        return bool(info["success"] > 0)

    def expert_action(self) -> NDArray[np.float32]:
        """What the scripted expert does now, float32, (4,), in [-1, 1]; it knows the object's pose."""
        return np.clip(self._expert.get_action(self._raw), -1.0, 1.0).astype(np.float32)

    @property
    def state(self) -> NDArray[np.float32]:
        """The robot's own state, float32, (4,)."""
        return self._raw[:STATE_SIZE].astype(np.float32)

    def observe(self) -> Observation:
        """What the policy sees now."""
        return Observation(self._render(IMAGE_SIZE), self.state)

    def picture(self) -> NDArray[np.uint8]:
        """The same view for people, uint8, (256, 256, 3)."""
        return self._render(PICTURE_SIZE)

    def _render(self, size: int) -> NDArray[np.uint8]:
        if size not in self._renderers:
            self._renderers[size] = mujoco.Renderer(self._env.model, size, size)
        renderer = self._renderers[size]
        renderer.update_scene(self._env.data, camera=CAMERA, scene_option=self._options)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = False
        return renderer.render().copy()

    def close(self) -> None:
        """Free the renderers; left to the garbage collector they print errors when Python exits."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def __enter__(self) -> MetaWorldTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def demonstrate(
    task: MetaWorldTask, seed: int, *, noise: float = 0.0, stride: int = 1, max_steps: int = 150, hold: int = 6
) -> Demonstration | None:
    """Record the scripted expert on one seed.

    Args:
        task: the environment.
        seed: environment seed; also seeds the noise.
        noise: size of the disturbance that is added to what is executed, never to what is recorded, so
            that the demonstrations hold recoveries; smoothed over time.
        stride: an image is kept at every ``stride``-th step.
        max_steps: the episode is given up after as many steps.
        hold: the episode ends after as many solved steps.

    Returns:
        The demonstration, or None where the expert did not solve the task.
    """
    rng = np.random.default_rng(seed)
    observation = task.reset(seed)
    images, steps, states, actions = [], [], [], []
    disturbance = np.zeros(ACTION_SIZE)
    solved = 0
    for step in range(max_steps):
        if step % stride == 0:
            observation = observation if step == 0 else task.observe()
            images.append(observation.image)
            steps.append(step)
        action = task.expert_action()
        states.append(task.state)
        actions.append(action)
        disturbance = 0.8 * disturbance + 0.4 * noise * rng.normal(size=ACTION_SIZE)
        disturbance[3] = 0.0  # the gripper is left alone
        solved += task.step(action + disturbance)
        if solved >= hold:
            break
    if not solved:
        return None
    return Demonstration(np.stack(images), np.array(steps), np.stack(states), np.stack(actions))
