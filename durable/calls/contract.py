"""Contracts: a class that says which methods a service has, shared by those who offer it and those who call it.

    @service("inventory", version="1.2")
    class Inventory(Protocol):
        async def reserve(self, sku: str, count: int) -> Reservation: ...

Versions are two numbers. A provider serves a caller when the first is the same, and its second is not below the
caller's. Of one version, both ends must declare the same arguments and results; a later version may have more methods,
and may change a method in ways that older callers do not notice.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol, TypeVar

import msgspec

from durable.arguments import checked, length_of_time
from durable.calls.payload import Payload, arguments_of, binder, digest_of, read_json, refuse_defaults
from durable.calls.telemetry import TRAFFIC
from durable.duration import Duration
from durable.errors import IncompatibleService, InvalidMessage, InvalidSetting, NoProvider, text_of
from durable.messages.codecs.classes import type_variables
from durable.messages.codecs.set_order import text_in_one_order
from durable.redaction import shown
from durable.transports.frames import MAX_METHODS, Call, Offer, Signature

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION: Final = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_LONGEST_METHOD: Final = 200
_LONGEST_TEXT: Final = 1_000
_CONTRACT: Final = "__durable_contract__"
_OPTIONS: Final = "__durable_call__"
_PLAIN: Final = (object, Protocol, typing.Generic)


@dataclass(frozen=True)
class Options:
    """Options of a method, in seconds. None: the default."""

    timeout: float | None = None
    expiry: float | None = None
    fire_and_forget: bool = False


class Method:
    """A method of a contract. Raises InvalidSetting for a declaration that cannot be called from elsewhere."""

    def __init__(self, of: str, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.full_name = f"{of}.{self.name}"
        self.options: Options = getattr(function, _OPTIONS, Options())
        self._function = function
        declared = inspect.signature(function)
        self.signature = declared.replace(parameters=list(declared.parameters.values())[1:])
        self._refuse_shape(declared)

    def _refuse_shape(self, declared: inspect.Signature) -> None:
        if not inspect.iscoroutinefunction(self._function):
            raise InvalidSetting(f"{self.full_name}: is not async; write `async def {self.name}`")
        if len(self.name) > _LONGEST_METHOD:
            raise InvalidSetting(f"{self.full_name}: the name is longer than {_LONGEST_METHOD} characters; shorten it")
        if not declared.parameters:
            raise InvalidSetting(f"{self.full_name}: has no `self`; write it as a method")
        for parameter in self.signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidSetting(f"{self.full_name}: {parameter}: name each argument, or take a list or a dict")
            if parameter.annotation is parameter.empty:
                raise InvalidSetting(f"{self.full_name}: {parameter.name}: has no annotation; say its type")
        if self.signature.return_annotation is self.signature.empty:
            raise InvalidSetting(f"{self.full_name}: the result has no annotation; write -> None where there is none")

    @cached_property
    def _hints(self) -> dict[str, Any]:
        hints = typing.get_type_hints(self._function, include_extras=True)
        for name, hint in hints.items():
            if typing.get_origin(hint) in (typing.ClassVar, typing.Final):
                raise InvalidSetting(f"{self.full_name}: {name}: is {hint}; write the type alone")
            for variable in type_variables(hint):
                raise InvalidSetting(
                    f"{self.full_name}: {name}: {variable} may be any type; write the method with its types in "
                    "this contract"
                )
        if self.options.fire_and_forget and hints["return"] is not type(None):
            raise InvalidSetting(f"{self.full_name}: fire_and_forget has no result; write -> None")
        return hints

    @cached_property
    def _class(self) -> type[msgspec.Struct]:
        return arguments_of(self.signature, self._hints)

    @cached_property
    def bind(self) -> Callable[..., msgspec.Struct]:
        """Function that makes the arguments of those of a call, and raises TypeError as the method would."""
        return binder(self._class, self.signature)

    @cached_property
    def arguments(self) -> Payload:
        return Payload(self._class)

    @cached_property
    def result(self) -> Payload:
        return Payload(self._hints["return"])

    @cached_property
    def is_keyed(self) -> bool:
        """True when an argument is given by name only."""
        return any(each.kind is each.KEYWORD_ONLY for each in self.signature.parameters.values())

    @cached_property
    def described(self) -> Signature:
        """The method as the other end sees it."""
        parameters = [_shown(each, self._hints[name]) for name, each in self.signature.parameters.items()]
        result = self._hints["return"]
        signature = self.signature.replace(
            parameters=parameters, return_annotation=None if result is type(None) else result
        )
        return Signature(
            self.name, digest_of(self.arguments, self.result), shown(f"{self.name}{signature}", _LONGEST_TEXT)
        )

    def read_json(self, body: bytes) -> dict[str, Any]:
        """Return the arguments in a JSON object, by their names. Raises InvalidMessage when they do not fit."""
        named = arguments_of(self.signature, self._hints, by_name=True)
        return msgspec.structs.asdict(read_json(body, named))

    def build(self) -> None:
        """Raise InvalidSetting for types that have no encoding, and NameError for a class that is yet to come."""
        try:
            refuse_defaults(self.signature, self._hints)
            _ = self.described, self.bind
        except (NameError, InvalidSetting):
            raise
        except Exception as error:  # of msgspec, of pydantic, or of the class's own code
            raise InvalidSetting(f"{self.full_name}: cannot be called: {text_of(error)}") from error

    def call(self, function: Callable[..., Any], body: bytes) -> Any:
        """Call a function with the arguments in these bytes. Raises InvalidMessage when they do not fit."""
        arguments = self.arguments.read(body)
        values = [getattr(arguments, name) for name in self.signature.parameters]
        if not self.is_keyed:
            return function(*values)
        by_name = {
            name: value
            for (name, each), value in zip(self.signature.parameters.items(), values, strict=True)
            if each.kind is each.KEYWORD_ONLY
        }
        return function(*values[: len(values) - len(by_name)], **by_name)


@dataclass(frozen=True, eq=False)
class Contract:
    """A declared service."""

    name: str
    version: str
    cls: type[Any]
    methods: Mapping[str, Method]

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    @cached_property
    def offer(self) -> Offer:
        """The service as those who call it see it. Raises InvalidSetting for types that have no encoding."""
        for method in self.methods.values():
            try:
                method.build()
            except NameError as error:
                raise InvalidSetting(f"{method.full_name}: {error}; declare the class where the service is") from None
        return Offer(self.name, self.version, [method.described for method in self.methods.values()])

    def check(self, offered: Offer | None, where: str) -> None:
        """Raise NoProvider when the service is not offered there, IncompatibleService when it cannot serve this end."""
        if offered is None:
            raise NoProvider(f"{self.name}: not offered at {where}")
        if difference := self.difference(offered):
            raise IncompatibleService(f"{self.title}: {where} offers {shown(offered.version)}: {difference}")

    def misfit(self, call: Call) -> str:
        """Return what keeps a call of a method of this contract from running; nothing when it may run."""
        if call.version and _numbers(call.version) != _numbers(self.version):  # a later version serves earlier callers
            return _apart(call.version, self.version)
        described = self.methods[call.method].described
        return "" if call.schema in (b"", described.digest) else f"the method differs: here {described.text}"

    def difference(self, offered: Offer) -> str:
        """Return what keeps this offer from serving callers of this contract; nothing when it can."""
        if apart := _apart(self.version, offered.version):
            return apart
        here, there = _numbers(self.version), _numbers(offered.version)
        known = {each.method: each for each in offered.signatures}
        missing = sorted(self.methods.keys() - known.keys())
        if missing and not offered.is_partial:  # of a part, those which are not told may be there, for others
            return f"it has no {', '.join(missing)}"
        if there > here:
            return ""
        return "; ".join(
            _how(method.described, known[name])
            for name, method in self.methods.items()
            if name in known and method.described.digest != known[name].digest
        )


@checked
def service(name: str, *, version: str = "1.0") -> Callable[[type[T]], type[T]]:
    """Declare a class as the contract of a service: its public methods can be called by other services.

    `name`: of the service, for its callers. `version`: two numbers, as in "1.2"; raise the second for what older
    callers do not notice, the first for anything else. Each method is async, its arguments and its result are
    annotated; a method may have `call` options. Raises InvalidSetting, with the name of the method, for any other
    class.
    """
    if not _NAME.fullmatch(name):
        raise InvalidSetting(f"service: name={name!r} is no name; give letters, digits, '.', '-' and '_'")
    if not _VERSION.fullmatch(version):
        raise InvalidSetting(f"service: version={version!r} is no version; give two numbers, such as '1.2'")
    if name == TRAFFIC:
        raise InvalidSetting(f"service: name={name!r} is durable's own; give another one")

    def declare(cls: type[T]) -> type[T]:
        if not isinstance(cls, type):
            raise InvalidSetting(f"service: {cls!r} is no class; put @service above a class with async methods")
        methods = {method.name: method for method in _methods(cls)}
        if not methods:
            raise InvalidSetting(f"service: {cls.__qualname__} has no public method; declare one with `async def`")
        if len(methods) > MAX_METHODS:
            raise InvalidSetting(f"service: {cls.__qualname__} has more than {MAX_METHODS:,} methods; split it")
        for method in methods.values():
            try:
                method.build()
            except NameError:  # a class that is declared below: when the service is offered or called
                method.__dict__.pop("_hints", None)
        setattr(cls, _CONTRACT, Contract(name, version, cls, methods))
        return cls

    return declare


@checked
def call(
    *, timeout: Duration | None = None, expiry: Duration | None = None, fire_and_forget: bool = False
) -> Callable[[F], F]:
    """Set options of a method of a service: `@call(timeout=30)`.

    `timeout`: longest wait for the result (default: the setting call_timeout). `expiry`: time after which a call that
    still waits for its turn at the provider is not run (default: the timeout). `fire_and_forget`: the call returns when
    it has been begun, and an error goes to the caller's `on_error`. Raises InvalidSetting.
    """
    options = Options(
        None if timeout is None else _seconds("timeout", timeout),
        None if expiry is None else _seconds("expiry", expiry),
        fire_and_forget,
    )

    def declare(function: F) -> F:
        setattr(function, _OPTIONS, options)
        return function

    return declare


def contract_of(cls: object) -> Contract:
    """Return the contract that a class declares. Raises InvalidSetting for a class that declares none."""
    found = vars(cls).get(_CONTRACT) if isinstance(cls, type) else None
    if not isinstance(found, Contract):
        name = getattr(cls, "__qualname__", None) or repr(cls)
        raise InvalidSetting(f'contract={name}: is no service; declare it with @service("name", version="1.0")')
    return found


def _seconds(name: str, value: Duration) -> float:
    seconds = length_of_time("call", name, value).total_seconds()
    if seconds <= 0:
        raise InvalidSetting(f"call: {name}={value!r}: give a time above zero, such as 5 or '30s'")
    return seconds


def _methods(cls: type) -> Iterator[Method]:
    names = dict.fromkeys(name for base in reversed(cls.__mro__) if base not in _PLAIN for name in vars(base))
    for name in names:
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        if not inspect.isfunction(member):
            raise InvalidSetting(
                f"{cls.__qualname__}.{name}: is no method; a service has async methods and nothing else"
            )
        yield Method(cls.__qualname__, member)


@lru_cache(1_000)
def _numbers(version: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(version)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def _apart(here: str, there: str) -> str:
    """Return what keeps a provider of the version `there` from serving callers of the version `here`, if anything."""
    caller, provider = _numbers(here), _numbers(there)
    if caller[0] != provider[0]:
        return "another first number means other methods; call and offer the same one"
    return "it is older than the caller; deploy providers before their callers" if provider < caller else ""


def _how(here: Signature, there: Signature) -> str:
    if here.text == there.text:
        return f"{here.method} differs: a class, or a default, of {here.text} is declared otherwise there"
    return f"{here.method} differs: here {here.text}, there {shown(there.text, _LONGEST_TEXT)}"


def refuse_misfit(contract: Contract, implementation: object) -> None:
    """Raise InvalidSetting for an object that lacks a method of the contract, or whose method takes other arguments."""
    for name, method in contract.methods.items():
        function = getattr(implementation, name, None)
        who = f"{type(implementation).__qualname__}.{name}"
        if function is None:
            raise InvalidSetting(f"{who}: is missing; {contract.title} has it")
        if not inspect.iscoroutinefunction(function):
            raise InvalidSetting(f"{who}: is not async; write `async def {name}`")
        try:
            bound = inspect.signature(function).bind(
                *(each for each in method.signature.parameters.values() if each.kind is not each.KEYWORD_ONLY),
                **{each.name: each for each in method.signature.parameters.values() if each.kind is each.KEYWORD_ONLY},
            )
        except TypeError as error:
            raise InvalidSetting(f"{who}: does not take the arguments of {method.full_name}: {error}") from None
        for own, given in bound.arguments.items():
            if isinstance(given, inspect.Parameter) and _is_misnamed(own, given, method.signature):
                raise InvalidSetting(
                    f"{who}: has {own!r} where {method.full_name} has {given.name!r}; "
                    "give its arguments the same names, in the same order"
                )


def _shown(parameter: inspect.Parameter, annotation: Any) -> inspect.Parameter:
    """Return a parameter for the eye, alike in each process."""
    if parameter.default is parameter.empty:
        return parameter.replace(annotation=annotation)
    return parameter.replace(annotation=annotation, default=_Default(parameter.default))


class _Default:
    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return text_in_one_order(self._value)


def _is_misnamed(own: str, given: inspect.Parameter, signature: inspect.Signature) -> bool:
    """Tell whether an argument has another name. Those without a name for callers are free, but for each other's."""
    if given.kind is given.POSITIONAL_OR_KEYWORD:
        return own != given.name
    return given.kind is given.POSITIONAL_ONLY and own != given.name and own in signature.parameters


def decoded_result(method: Method, body: bytes) -> Any:
    """Return the result in these bytes. Raises InvalidMessage."""
    try:
        return method.result.read(body)
    except InvalidMessage as error:
        raise InvalidMessage(f"{method.full_name}: the result does not fit: {error}") from error
