"""The recipe of an environment: all that is needed to make it, and all that travels to a worker."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeAlias

import cloudpickle
import gymnasium as gym
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

from gymtask.config import require_int
from gymtask.errors import MakerError

AnyEnv: TypeAlias = "gym.Env[Any, Any]"
EnvSource: TypeAlias = "str | EnvSpec | Callable[..., AnyEnv]"
Wrapper: TypeAlias = "Callable[[AnyEnv], AnyEnv]"


@dataclass(frozen=True)
class EnvironmentMaker:
    """Makes one environment per call.

    An id is looked up once, in the process that builds the maker, and its `EnvSpec` is kept: what
    is registered there is known wherever the maker goes.

    Attributes:
        env: An `EnvSpec`, or a callable that returns a `gymnasium.Env`.
        wrappers: Callables `env -> env`, applied in order.
        render_mode: Given to `gymnasium.make`, or to a callable whose signature takes it.
        max_episode_steps: The time limit, in place of the one that the environment is registered
            with.
        info_keys: Keys of the info dict whose values are kept.
        keep_float64: Whether float64 observations are stored as such.
        frame_stack: Frames that a policy sees at once; None shows single ones, without an axis.
        kwargs: Further keywords of `gymnasium.make`, or of the callable.
    """

    env: EnvSpec | Callable[..., AnyEnv]
    wrappers: tuple[Wrapper, ...] = ()
    render_mode: str | None = None
    max_episode_steps: int | None = None
    info_keys: tuple[str, ...] = ()
    keep_float64: bool = False
    frame_stack: int | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        env: EnvSource,
        *,
        wrappers: Sequence[Wrapper] = (),
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        info_keys: Sequence[str] = (),
        keep_float64: bool = False,
        frame_stack: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> EnvironmentMaker:
        """Looks an id up and checks the arguments.

        Raises:
            MakerError: An argument breaks its rule.
            ModuleNotFoundError: The id names a module that is not there.
            gymnasium.error.Error: The id is unknown, deprecated or malformed; Gymnasium's own
                error.
        """
        if isinstance(env, gym.Env):
            raise MakerError(
                f"`env` must be a recipe, got the environment {env!r} itself; pass its id, or a"
                " function that makes it"
            )
        if not isinstance(env, (str, EnvSpec)) and not callable(env):
            raise MakerError(
                "`env` must be an id, an EnvSpec or a callable that returns a gymnasium.Env, got"
                f" {env!r}"
            )
        if not isinstance(info_keys, (list, tuple)) or not all(
            isinstance(key, str) for key in info_keys
        ):
            raise MakerError(f"`info_keys` must be a sequence of strings, got {info_keys!r}")
        if not isinstance(wrappers, (list, tuple)):
            raise MakerError(f"`wrappers` must be a list of callables, got {wrappers!r}")
        for wrapper in wrappers:
            if not callable(wrapper):
                raise MakerError(
                    f"`wrappers` must be callables that take an environment, got {wrapper!r}"
                )
        steps_ok = max_episode_steps is None or (
            isinstance(max_episode_steps, Integral) and max_episode_steps >= 1
        )
        if not steps_ok:
            raise MakerError(f"`max_episode_steps` must be at least 1, got {max_episode_steps!r}")
        for problem in () if frame_stack is None else require_int("frame_stack", frame_stack, 1):
            raise MakerError(f"{problem}; None shows single frames")
        source = find_spec(env) if isinstance(env, str) else env
        return cls(
            env=source,
            wrappers=tuple(wrappers),
            render_mode=render_mode,
            max_episode_steps=None if max_episode_steps is None else int(max_episode_steps),
            info_keys=tuple(info_keys),
            keep_float64=keep_float64,
            frame_stack=None if frame_stack is None else int(frame_stack),
            kwargs=dict(kwargs or {}),
        )

    @property
    def name(self) -> str:
        """The id of the environment, or the name of the callable that makes it."""
        if isinstance(self.env, EnvSpec):
            return self.env.id
        return getattr(self.env, "__name__", repr(self.env))

    def with_render_mode(self, render_mode: str | None) -> EnvironmentMaker:
        """The same recipe with another render mode."""
        return replace(self, render_mode=render_mode)

    def __call__(self) -> AnyEnv:
        """Makes a new environment.

        Raises:
            MakerError: A callable or a wrapper returned no `gymnasium.Env`, or a time limit cannot
                be changed.
        """
        env = (
            self._make_from_spec(self.env)
            if isinstance(self.env, EnvSpec)
            else self._make_from_callable()
        )
        for wrapper in self.wrappers:
            env = _checked(wrapper(env), wrapper)
        return env

    def _make_from_spec(self, spec: EnvSpec) -> AnyEnv:
        keywords = dict(self.kwargs)
        # Only what was asked for is passed: an explicit None would override what the spec itself
        # says.
        if self.render_mode is not None:
            keywords["render_mode"] = self.render_mode
        if self.max_episode_steps is not None:
            keywords["max_episode_steps"] = self.max_episode_steps
        return gym.make(spec, **keywords)

    def _make_from_callable(self) -> AnyEnv:
        source: Callable[..., AnyEnv] = self.env  # type: ignore[assignment]
        keywords = dict(self.kwargs)
        if self.render_mode is not None and takes_keyword(source, "render_mode"):
            keywords["render_mode"] = self.render_mode
        if needs_keyword(source, "num_envs") and "num_envs" not in keywords:
            raise MakerError(
                f"{source!r} must make a gymnasium.Env without `num_envs`{_VECTOR_HINT}"
            )
        env = _checked(source(**keywords), source)
        if self.max_episode_steps is None:
            return env
        layer = env
        while isinstance(layer, gym.Wrapper):
            if isinstance(layer, TimeLimit):
                raise MakerError(
                    f"`max_episode_steps` must be set where the environment is made: {self.name}"
                    " returns one that has a time limit already, and a second one of"
                    f" {self.max_episode_steps} steps could only shorten it"
                )
            layer = layer.env
        return TimeLimit(env, self.max_episode_steps)

    def make_vector(self, num_envs: int, seed: int) -> Any:
        """Makes a `gymnasium.vector.VectorEnv` of so many environments.

        An id must be registered with a `vector_entry_point`. A callable gets the keywords
        `num_envs` and `seed` if its signature takes them.

        Raises:
            MakerError: It is no VectorEnv, or of another size; or there are wrappers, which are
                made for single environments.
            gymnasium.error.Error: The id has no vector entry point.
        """
        if self.wrappers:
            raise MakerError(
                "`wrappers` must be empty in native mode, as they take single environments, got"
                f" {list(self.wrappers)}; pass a callable that returns the wrapped VectorEnv"
            )
        keywords = dict(self.kwargs)
        given = {"render_mode": self.render_mode, "max_episode_steps": self.max_episode_steps}
        if isinstance(self.env, EnvSpec):
            keywords |= {name: value for name, value in given.items() if value is not None}
            keywords.pop("disable_env_checker", None)  # of gymnasium.make alone
            try:
                env = gym.make_vec(
                    self.env, num_envs, vectorization_mode="vector_entry_point", **keywords
                )
            except TypeError as error:
                self._refuse_keyword(error, given)
                raise
        else:
            if self.max_episode_steps and not takes_keyword(self.env, "max_episode_steps"):
                raise MakerError(
                    f"`max_episode_steps` must be None in native mode, as {self.name} takes no such"
                    f" keyword, got {self.max_episode_steps}; let it make the VectorEnv with that"
                    " time limit"
                )
            given |= {"num_envs": num_envs, "seed": seed}
            for name, value in given.items():
                if value is not None and takes_keyword(self.env, name):
                    keywords[name] = value
            env = self.env(**keywords)  # type: ignore[assignment]
        if not isinstance(env, VectorEnv):
            raise MakerError(
                f"{self.name} must return a gymnasium.vector.VectorEnv in native mode, got {env!r}"
            )
        shape = env.observation_space.shape or ()
        # Some (EnvPool) call the space of one environment their observation space, too.
        batched = shape and env.observation_space is not env.single_observation_space
        if env.num_envs != num_envs or (batched and shape[0] != num_envs):
            found = f"one of {env.num_envs} with observations {shape}"
            env.close()
            raise MakerError(
                f"{self.name} must return a VectorEnv of {num_envs} environments (num_envs), all of"
                f" them in one batch (batch_size), got {found}"
            )
        return env

    def _refuse_keyword(self, error: TypeError, given: Mapping[str, Any]) -> None:
        """Says what to do where it is one of those `given` that the entry point does not take."""
        for name, value in given.items():
            if value is not None and f"unexpected keyword argument '{name}'" in str(error):
                raise MakerError(
                    f"`{name}` must be None in native mode for {self.name}, whose VectorEnv takes"
                    f" no such keyword, got {value!r}; pass{_INSTEAD[name]} a callable that returns"
                    " a VectorEnv made that way"
                ) from error

    def to_bytes(self) -> bytes:
        """The maker as bytes that any process with gymtask can read.

        Code from `__main__` goes along by value.

        Raises:
            MakerError: The recipe reaches a torch module or tensor, or something that cannot be
                pickled.
        """
        file = io.BytesIO()
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        try:
            if isinstance(self.env, EnvSpec):
                state["env"] = without_main(self.env)
            RecipePickler(file, self.name).dump(state)
        except MakerError:
            raise
        except Exception as error:
            raise MakerError(
                f"the recipe of {self.name} must be picklable to travel to a worker, got"
                f" {type(error).__name__}: {error}"
            ) from error
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> EnvironmentMaker:
        """The maker that `to_bytes` wrote."""
        return EnvironmentMaker(**pickle.loads(data))

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvironmentMaker.from_bytes, (self.to_bytes(),)


class RecipePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Refuses torch modules and tensors, of which every worker would get a copy."""

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def reducer_override(self, obj: Any) -> Any:
        """Looks at every object on its way into the pickle."""
        # torch is not imported here (workers must not need it), so its classes are known by their
        # names.
        for cls in type(obj).__mro__:
            if cls.__module__.partition(".")[0] == "torch" and cls.__name__ in ("Module", "Tensor"):
                raise MakerError(
                    f"the recipe of {self._name} must not reach a torch {cls.__name__}, got one of"
                    f" type {type(obj).__module__}.{type(obj).__qualname__}; a lambda over `self`"
                    " captures the whole task: pass what the environment needs as plain values"
                    " instead"
                )
        return super().reducer_override(obj)


def find_spec(env_id: str) -> EnvSpec:
    """The spec that `gymnasium.make` would take for an id.

    "module:Name-v0" imports the module first; an id without a version means the latest one.

    Raises:
        ModuleNotFoundError: There is no such module.
        gymnasium.error.Error: The id is unknown, deprecated or malformed.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, base, version = registration.parse_env_id(name)
    latest = registration.find_highest_version(namespace, base)
    if latest is not None and version is None:
        name = registration.get_env_id(namespace, base, latest)
        gym.logger.warn(f"Using the latest version `{name}` of the environment `{env_id}`.")
    elif latest is not None and version is not None and version < latest:
        gym.logger.deprecation(f"`{name}` is out of date; its latest version is `v{latest}`.")
    return gym.spec(name)


def without_main(spec: EnvSpec) -> EnvSpec:
    """The spec with what its entry point names in `__main__` in place of the name.

    Raises:
        MakerError: One of its wrappers is such a name.
    """
    for wrapper in spec.additional_wrappers:
        if wrapper.entry_point.startswith("__main__:"):
            raise MakerError(
                f"the wrappers in the spec of {spec.id} must be importable by a worker, got"
                f" {wrapper.entry_point!r}; pass it in `wrappers` instead"
            )
    entry = spec.entry_point
    if not isinstance(entry, str) or not entry.startswith("__main__:"):
        return spec
    target: Any = sys.modules["__main__"]
    for attribute in entry.partition(":")[2].split("."):
        target = getattr(target, attribute)
    return replace(spec, entry_point=target, vector_entry_point=None)


def takes_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether `function` can be called with `keyword`."""
    return any(
        parameter.kind is parameter.VAR_KEYWORD or parameter.name == keyword
        for parameter in _keywords_of(function)
    )


def needs_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether `function` cannot be called without `keyword`."""
    return any(
        parameter.name == keyword and parameter.default is parameter.empty
        for parameter in _keywords_of(function)
    )


def _keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
    kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
    return [parameter for parameter in parameters if parameter.kind in kinds]


_INSTEAD = {
    "max_episode_steps": " a keyword that it has (ale_py's: max_num_frames_per_episode), or",
    "render_mode": "",
}
_VECTOR_HINT = "; a VectorEnv can only be collected from, with env_worker_mode='native'"


def _checked(env: Any, source: object) -> AnyEnv:
    if not isinstance(env, gym.Env) or isinstance(env, VectorEnv):
        raise MakerError(
            f"{source!r} must return a gymnasium.Env, got {env!r}"
            + (_VECTOR_HINT if isinstance(env, VectorEnv) else "")
        )
    return env
