"""The login of LTI 1.3 for servers of Unix accounts; it imports ltiauthenticator."""

from __future__ import annotations

from typing import Any

from ltiauthenticator.lti13.auth import LTI13Authenticator
from tornado.web import HTTPError

from dlo_lib.base.errors import UserError
from dlo_lib.hub.lti import unix_name


class UnixAccounts(LTI13Authenticator):
    """Log in only users of a Moodle who have an account on this machine."""

    def get_username(self, token: dict[str, Any]) -> str:
        """Return the user's account, or refuse the launch with the reason."""
        try:
            return unix_name(token, self.username_key)
        except UserError as error:
            raise HTTPError(403, "%s", str(error), reason="no account") from error
