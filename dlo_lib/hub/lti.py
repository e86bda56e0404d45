"""The Hub's users come from a Moodle, by LTI 1.3: the settings of ltiauthenticator from the table [lti].

The launch carries claims about the user. One of them becomes the name: for servers on the machine of the Hub,
that of a Unix account. ``email`` cannot be one, and ``sub`` is a number. ``custom_login`` is the parameter
``login=$User.username`` of the tool in Moodle, which its administrator writes. ltiauthenticator takes ``sub``
in place of a missing claim; here a launch without the claim is refused.

A page in a frame of Moodle is a third party there: browsers send its cookies only if they are marked
``SameSite=None; Secure``, and show it only if it names Moodle as an ancestor.

Reference: LTI 1.3 Core (5.3.6.1, custom properties); RFC 6265bis (4.1.2.7, SameSite).
"""

from __future__ import annotations

from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.hub.accounts import has_account, system_account
from dlo_lib.hub.read_settings import NAME
from dlo_lib.hub.settings import HubSettings


def authenticator(settings: HubSettings) -> dict[str, dict[str, object]]:
    """Return the settings of LTI 1.3; none if ``hub.toml`` has no table [lti]."""
    platform = settings.lti
    if platform is None:
        return {}
    return {
        "LTI13Authenticator": {
            "issuer": platform.issuer,
            "client_id": [platform.client_id],
            "authorize_url": platform.authorize_url,
            "jwks_endpoint": platform.keys_url,
            "username_key": platform.username,
            "uri_scheme": platform.issuer.partition(":")[0],
        }
    }


def in_a_frame(settings: HubSettings) -> dict[str, Any]:
    """Return the settings of tornado with which Moodle can show the Hub in a frame; none without [lti]."""
    if settings.lti is None:
        return {}
    return {
        "cookie_options": {"SameSite": "None", "Secure": True},
        "headers": {"Content-Security-Policy": frame_ancestors(settings)},
    }


def frame_ancestors(settings: HubSettings) -> str:
    """Return which pages may show a server of the Hub in a frame: its own, and those of the Moodle."""
    return " ".join(["frame-ancestors 'self'", *([settings.lti.issuer] if settings.lti else [])])


def name_in(claims: dict[str, object], key: str) -> str:
    """Return the name of the user in the claims of a launch; "" if there is none.

    The Helm values of Kubernetes hold the source of this function, so it uses nothing of this module.

    Args:
        key: a claim, or ``custom_`` and a custom parameter of the tool.
    """
    custom = claims.get("https://purl.imsglobal.org/spec/lti/claim/custom")
    if key.startswith("custom_"):
        value = custom.get(key[len("custom_") :]) if isinstance(custom, dict) else None
    else:
        value = claims.get(key)
    # Moodle leaves a variable that it does not know as it is, such as $User.username.
    return value if isinstance(value, str) and not value.startswith("$") else ""


def unix_name(claims: dict[str, object], key: str) -> str:
    """Return the Unix account of the user in the claims of a launch.

    Raises:
        UserError: the claim is missing, or is no account of a person on this machine.
    """
    name = name_in(claims, key)
    if not name:
        cure = tr("its administrator writes login=$User.username to the custom parameters of the tool")
        raise UserError(tr("Moodle sent no {key}: {cure}", key=key, cure=cure))
    if not NAME.fullmatch(name) or system_account(name) or not has_account(name):
        text = 'no account "{name}" of a person on this machine: the administrator of the Hub creates it'
        raise UserError(tr(text, name=name))
    return name
