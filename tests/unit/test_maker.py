"""The recipe of an environment: what it makes, what it refuses, and how it travels."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.wrappers import RescaleAction, TimeLimit

from gymtask.errors import ConfigurationError, MakerError
from gymtask.maker import EnvironmentMaker, takes_keyword
from gymtask.testing import ScriptedEnv

create = EnvironmentMaker.create


class KeywordEnv(ScriptedEnv):
    """Keeps the keywords that it was made with."""

    made: int = 0

    def __init__(self, **keywords: Any) -> None:
        super().__init__(lengths=1000, render_mode=keywords.get("render_mode"))
        self.keywords = keywords
        KeywordEnv.made += 1


class Tag(gym.Wrapper[Any, Any, Any, Any]):
    pass


class OuterTag(gym.Wrapper[Any, Any, Any, Any]):
    pass


@pytest.fixture
def keyword_id() -> Iterator[str]:
    gym.register("MakerKeyword-v0", KeywordEnv, max_episode_steps=50, kwargs={"a": 1})
    yield "MakerKeyword-v0"
    del gym.registry["MakerKeyword-v0"]


@pytest.fixture
def module_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An id whose module is imported nowhere yet."""
    (tmp_path / "maker_module.py").write_text(
        textwrap.dedent(
            """
            import gymnasium
            from gymtask.testing import ScriptedEnv
            gymnasium.register("FromModule-v0", ScriptedEnv, max_episode_steps=100)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "maker_module:FromModule-v0"
    sys.modules.pop("maker_module", None)
    gym.registry.pop("FromModule-v0", None)


def layers(env: Any) -> list[str]:
    """Names of the wrappers from the outside in, and of the environment."""
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(type(env).__name__)
        env = env.env
    return [*found, type(env).__name__]


def play(env: Any, steps: int) -> int:
    """Steps until the episode is truncated; how many it took."""
    env.reset(seed=0)
    for t in range(1, steps + 1):
        if env.step(0)[3]:
            return t
    return 0


class TestMaking:
    def test_an_id_is_made_as_gymnasium_makes_it(self) -> None:
        env, plain = create("CartPole-v1")(), gym.make("CartPole-v1")
        assert layers(env) == layers(plain)
        assert env.spec == plain.spec
        np.testing.assert_array_equal(env.reset(seed=3)[0], plain.reset(seed=3)[0])
        env.close()
        plain.close()

    def test_each_call_makes_another(self) -> None:
        maker = create(ScriptedEnv)
        assert maker() is not maker()

    def test_a_spec_is_made_with_all_that_it_says(self, keyword_id: str) -> None:
        spec = gym.spec(keyword_id)
        env: Any = create(spec)()
        assert env.unwrapped.keywords == {"a": 1}
        assert play(env, 60) == 50

    def test_keywords_arrive_once_and_the_callers_are_not_touched(self, keyword_id: str) -> None:
        keywords = {"b": [2]}
        maker = create(keyword_id, kwargs=keywords)
        KeywordEnv.made = 0
        env: Any = maker()
        assert KeywordEnv.made == 1
        assert env.unwrapped.keywords == {"a": 1, "b": [2]}
        keywords["c"] = [3]
        assert maker.kwargs == {"b": [2]}
        assert gym.spec(keyword_id).kwargs == {"a": 1}

    def test_wrappers_are_applied_in_order_around_the_time_limit(self, keyword_id: str) -> None:
        env = create(keyword_id, wrappers=[Tag, lambda env: OuterTag(env)])()
        assert layers(env)[:3] == ["OuterTag", "Tag", "TimeLimit"]

    @pytest.mark.parametrize("limit", [5, 120, np.int64(7)])
    def test_a_time_limit_replaces_the_registered_one(self, keyword_id: str, limit: int) -> None:
        env = create(keyword_id, max_episode_steps=limit)()
        assert layers(env).count("TimeLimit") == 1
        assert play(env, 200) == limit

    def test_a_module_prefix_imports_the_module(self, module_id: str) -> None:
        maker = create(module_id, max_episode_steps=4, kwargs={"lengths": 900, "start": 3})
        assert maker.name == "FromModule-v0"
        env: Any = maker()
        assert env.action_space.start == 3
        env.reset(seed=0)
        assert [env.step(3)[3] for _ in range(4)] == [False, False, False, True]

    def test_the_latest_version_stands_for_none(self) -> None:
        with pytest.warns(UserWarning, match="Using the latest version `CartPole-v1`"):
            assert create("CartPole").name == "CartPole-v1"

    def test_an_old_version_is_made_with_gymnasiums_warning(self) -> None:
        with pytest.warns(DeprecationWarning, match="its latest version is `v1`"):
            assert create("CartPole-v0").name == "CartPole-v0"

    def test_a_callable_gets_its_keywords(self) -> None:
        env: Any = create(KeywordEnv, kwargs={"b": 2})()
        assert env.keywords == {"b": 2}
        assert layers(env) == ["KeywordEnv"]

    @pytest.mark.parametrize("limit", [1, 6])
    def test_a_time_limit_for_a_callable_is_put_around_it(self, limit: int) -> None:
        env = create(ScriptedEnv, max_episode_steps=limit, kwargs={"lengths": 99})()
        assert layers(env) == ["TimeLimit", "ScriptedEnv"]
        assert play(env, 10) == limit

    def test_a_second_time_limit_is_refused(self) -> None:
        maker = create(lambda: TimeLimit(ScriptedEnv(), 10), max_episode_steps=20)
        with pytest.raises(MakerError, match=r"`max_episode_steps` must be set where .* of 20 st"):
            maker()

    @pytest.mark.parametrize("mode", ["rgb_array", None])
    def test_the_render_mode_goes_to_an_id_and_to_who_takes_it(
        self, keyword_id: str, mode: str | None
    ) -> None:
        expected = {} if mode is None else {"render_mode": mode}
        for source in (keyword_id, KeywordEnv):
            maker = create(source, render_mode="human").with_render_mode(mode)
            env: Any = maker()
            found = {k: v for k, v in env.unwrapped.keywords.items() if k != "a"}
            assert found == expected
        assert create(lambda: ScriptedEnv(), render_mode=mode)().render_mode is None

    def test_class_metadata_spec_and_spaces_stay_as_they_were(self, keyword_id: str) -> None:
        before = repr((KeywordEnv.metadata, gym.spec(keyword_id)))
        maker = create(
            keyword_id,
            render_mode="rgb_array",
            max_episode_steps=3,
            wrappers=[Tag],
            kwargs={"b": 2},
        )
        play(maker(), 5)
        maker.with_render_mode(None)().close()
        assert repr((KeywordEnv.metadata, gym.spec(keyword_id))) == before

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("CartPole-v1", "CartPole-v1"),
            (ScriptedEnv, "ScriptedEnv"),
            (lambda: ScriptedEnv(), "<lambda>"),
            (partial(ScriptedEnv, 4), f"{partial(ScriptedEnv, 4)!r}"),
        ],
    )
    def test_its_name_is_the_id_or_the_callables(self, source: Any, name: str) -> None:
        assert create(source).name == name


class TestRefusals:
    @pytest.mark.parametrize(
        ("env_id", "error", "message"),
        [
            ("Pendulum-v0", gym.error.DeprecatedEnv, "Please use `Pendulum-v1` instead"),
            ("Cartpoole-v1", gym.error.NameNotFound, "Did you mean: `CartPole`"),
            ("CartPole-v9", gym.error.VersionNotFound, "`v9` for environment `CartPole`"),
            ("nowhere/CartPole-v1", gym.error.NamespaceNotFound, "Namespace nowhere not found"),
            ("not an id", gym.error.Error, "Malformed environment ID"),
            ("no_such_module:CartPole-v1", ModuleNotFoundError, "No module named 'no_such_module'"),
        ],
    )
    def test_a_bad_id_is_gymnasiums_error_before_anything_is_made(
        self, env_id: str, error: type[Exception], message: str
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(error, match=message):
                create(env_id)

    def test_an_environment_that_moved_says_where_when_it_is_made(self) -> None:
        with pytest.warns(DeprecationWarning, match="`Hopper-v2` is out of date"):
            maker = create("Hopper-v2")
        with pytest.raises(ImportError, match="gymnasium-robotics"):
            maker()

    @pytest.mark.parametrize(
        ("source", "arguments", "message"),
        [
            (7, {}, "`env` must be an id, an EnvSpec or a callable that returns a gymnasium.Env, "),
            (ScriptedEnv(), {}, "`env` must be a recipe, got the environment <gymtask.testing"),
            (ScriptedEnv, {"info_keys": "t"}, "`info_keys` must be a sequence of strings, got 't'"),
            (ScriptedEnv, {"info_keys": [1]}, "`info_keys` must be a sequence of strings, got [1]"),
            (ScriptedEnv, {"wrappers": [7]}, "`wrappers` must be callables that take an env"),
            (ScriptedEnv, {"max_episode_steps": 0}, "`max_episode_steps` must be at least 1, got"),
            (ScriptedEnv, {"max_episode_steps": 2.5}, "`max_episode_steps` must be at least 1, "),
        ],
    )
    def test_a_bad_argument_is_named(
        self, source: Any, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(MakerError, match=f"^{re.escape(message)}"):
            create(source, **arguments)
        assert issubclass(MakerError, ConfigurationError)

    @pytest.mark.parametrize("which", ["env", "wrapper"])
    def test_what_returns_no_environment_is_named(self, which: str) -> None:
        maker = create(nothing) if which == "env" else create(ScriptedEnv, wrappers=[nothing])
        with pytest.raises(MakerError, match=r"nothing .* must return a gymnasium.Env, got None"):
            maker()

    @pytest.mark.parametrize("where", ["closure", "keyword", "wrapper", "attribute", "partial"])
    @pytest.mark.parametrize(
        ("thing", "kind"),
        [
            (torch.nn.Linear(2, 2), "Module"),
            (torch.zeros(2), "Tensor"),
            (torch.nn.Parameter(torch.zeros(2)), "Tensor"),
        ],
        ids=["module", "tensor", "parameter"],
    )
    def test_a_recipe_that_reaches_a_model_may_not_travel(
        self, thing: Any, kind: str, where: str
    ) -> None:
        class Holder:
            def __init__(self) -> None:
                self.model = thing

            def make(self) -> Any:
                return ScriptedEnv()

        def closure() -> Any:
            assert thing is not None
            return ScriptedEnv()

        makers: dict[str, Callable[[], EnvironmentMaker]] = {
            "closure": lambda: create(closure),
            "keyword": lambda: create(KeywordEnv, kwargs={"deep": {"down": [thing]}}),
            "wrapper": lambda: create(ScriptedEnv, wrappers=[lambda env: (Tag(env), thing)[0]]),
            "attribute": lambda: create(Holder().make),
            "partial": lambda: create(partial(nothing, thing)),
        }
        maker = makers[where]()
        name = f"torch {kind}, got one of type {type(thing).__module__}.{type(thing).__qualname__}"
        with pytest.raises(MakerError, match=f"must not reach a {re.escape(name)}"):
            maker.to_bytes()
        with pytest.raises(MakerError, match=re.escape(maker.name)):
            pickle.dumps(maker)

    def test_what_cannot_be_pickled_is_refused_with_the_reason(self) -> None:
        maker = create(KeywordEnv, kwargs={"stream": sys.stdout})
        with pytest.raises(MakerError, match=r"recipe of KeywordEnv must be picklable .* got Typ"):
            maker.to_bytes()


def nothing(*_: Any) -> Any:
    """Returns no environment."""


class TestTravel:
    def test_it_arrives_as_it_left(self, keyword_id: str) -> None:
        maker = create(
            keyword_id,
            wrappers=[Tag],
            render_mode="rgb_array",
            max_episode_steps=3,
            info_keys=["t"],
            keep_float64=True,
            kwargs={"b": 2},
        )
        again = pickle.loads(pickle.dumps(maker))
        assert again == maker
        assert EnvironmentMaker.from_bytes(maker.to_bytes()) == maker

    def test_lambdas_local_functions_and_local_classes_travel(self) -> None:
        class Local(ScriptedEnv):
            pass

        factor = 4

        def make(scale: int) -> Any:
            return Local(scale * factor)

        maker = create(make, kwargs={"scale": 2}, wrappers=[lambda env: Tag(env)])
        env: Any = EnvironmentMaker.from_bytes(maker.to_bytes())()
        env.reset(seed=0)
        assert layers(env) == ["Tag", "Local"]
        assert env.unwrapped.length == 8

    def test_another_process_can_read_it_without_torch_or_this_module(self, module_id: str) -> None:
        module, spec = create(module_id), gym.spec("FromModule-v0")
        assert module.env == spec
        code = """
        import sys
        from gymtask.maker import EnvironmentMaker
        env = EnvironmentMaker.from_bytes(sys.stdin.buffer.read())()
        print(env.unwrapped, "torch" in sys.modules)
        """
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            input=module.to_bytes(),
            capture_output=True,
            check=True,
        )
        assert out.stdout.decode().strip() == "<ScriptedEnv<FromModule-v0>> False"

    def test_an_entry_point_in_main_travels_by_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main: Any = sys.modules["__main__"]
        monkeypatch.setattr(main, "MakerNamespace", MakerNamespace, raising=False)
        spec = EnvSpec("InMain-v0", "__main__:MakerNamespace.Inner")
        parts = cloudpickle.loads(create(spec).to_bytes())
        assert parts["env"].entry_point is MakerNamespace.Inner
        assert spec.entry_point == "__main__:MakerNamespace.Inner"

    def test_wrappers_of_a_spec_that_live_in_main_are_refused(self) -> None:
        wrapper = WrapperSpec("Mine", "__main__:Mine", {})
        spec = EnvSpec("Wrapped-v0", ScriptedEnv, additional_wrappers=(wrapper,))
        with pytest.raises(
            MakerError, match="the wrappers in the spec of Wrapped-v0 must be impor"
        ):
            create(spec).to_bytes()

    def test_importable_wrappers_of_a_spec_travel(self) -> None:
        original = RescaleAction(gym.make("Pendulum-v1"), np.float32(-1.0), np.float32(1.0))
        assert original.spec is not None
        maker = EnvironmentMaker.from_bytes(create(original.spec).to_bytes())
        assert layers(maker())[0] == "RescaleAction"


class MakerNamespace:
    class Inner(ScriptedEnv):
        pass


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: None, False),
        (lambda render_mode: None, True),
        (lambda **anything: None, True),
        (lambda *render_mode: None, False),
        (ScriptedEnv, True),
        (dict, False),
    ],
)
def test_a_keyword_is_known_to_be_taken(function: Any, expected: bool) -> None:
    assert takes_keyword(function, "render_mode") == expected


def test_a_positional_only_parameter_takes_no_keyword() -> None:
    def function(render_mode: str, /) -> None:
        del render_mode

    assert not takes_keyword(function, "render_mode")
