"""What the hub refuses, as one line that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realvr.errors import UserError, explained

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOGIN = "run `hf auth login`, or set HF_TOKEN"
FORBIDDEN = (401, 403)


def api() -> HfApi:
    """The client, without progress bars where nobody watches."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi()


def has_token() -> bool:
    """Whether this user has logged in to the hub."""
    from huggingface_hub import get_token

    return bool(get_token())


@contextmanager
def reaching(name: str, page: str, instead: str) -> Iterator[None]:
    """Calls of the hub about the repository ``name``, whose web page is ``page``; whatever they raise becomes a
    `UserError`. ``instead`` is what to do without a network."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError:
        raise UserError(f"{name} is gated: accept its terms on {page}, then {LOGIN}") from None
    except errors.RepositoryNotFoundError:
        way = "your token may not read it" if has_token() else f"it is private: then {LOGIN}"
        raise UserError(f"{name} does not exist on the hub, or {way}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{name}: there is no such revision on the hub; {page} lists those there are") from None
    except errors.HFValidationError:
        raise UserError(f"{name}: not a name of the hub; write OWNER/NAME") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        why = " ".join((error.server_message or str(error)).split())[:160]
        if status in FORBIDDEN:
            way = "your token does not allow it; use one with write access" if has_token() else LOGIN
            raise UserError(f"{name}: the hub refuses ({status}: {why}); {way}") from None
        raise UserError(f"{name}: the hub answers {status or 'nothing'} ({why}); try again later") from None
    except Exception as error:
        if (known := explained(error)) is not None:
            raise known from None
        if not _is_network(error):
            raise
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"{name}: the hub cannot be reached ({why}); check the network, or {instead}") from None


def _is_network(error: BaseException | None) -> bool:
    """Whether a call failed before the hub answered: the client passes on what its HTTP library raises."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & {"TransportError", "OfflineModeIsEnabled", "ConnectionError", "LocalEntryNotFoundError"}:
            return True
        error = error.__cause__ or error.__context__
    return False
