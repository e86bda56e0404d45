"""The Hub's users come from a Moodle, by LTI 1.3: the settings of ltiauthenticator from the table [lti]."""

from __future__ import annotations

from dlo_lib.hub.settings import HubSettings

CLASS = "ltiauthenticator.lti13.auth.LTI13Authenticator"


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
