"""The inside of a worker process: one reward function, called as often as the parent asks."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

from gspo.errors import BadInputError
from gspo.rewards.calls import MisuseError, RewardError, RewardFunction, call_reward, load_reward

GRACE_SECONDS = 5.0
"""How long past its limit a call may live if nobody kills it, as when the parent itself was killed."""


def main(descriptor: int) -> None:
    """Loads the function that the first message names, then answers each message until the parent is gone.

    Messages are pickles from the parent; answers are JSON, so that nothing the function makes is unpickled.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    name, parameters = pickle.loads(connection.recv_bytes())
    try:
        function = load_reward(name, parameters)
    except BadInputError as error:
        _answer(connection, misuse=str(error))
        return
    _answer(connection, values=[])
    with open(os.devnull, "w") as nowhere:
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            _serve(connection, function, message, nowhere)


def _serve(connection: Connection, function: RewardFunction, message: bytes, nowhere: Any) -> None:
    try:
        seconds, arguments = pickle.loads(message)
    except Exception as error:  # noqa: BLE001 (columns may hold objects whose classes fail to load here)
        _answer(connection, error=f"its columns cannot be passed to a worker process ({error})")
        return
    # This watchdog needs neither the parent nor the interpreter lock.
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=nowhere)
    try:
        _answer(connection, values=call_reward(function, arguments))
    except MisuseError as error:
        _answer(connection, misuse=str(error))
    except RewardError as error:
        _answer(connection, error=str(error))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _answer(connection: Connection, **content: Any) -> None:
    connection.send_bytes(json.dumps(content).encode())
