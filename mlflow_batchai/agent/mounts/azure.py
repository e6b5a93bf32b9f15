"""What Azure Storage says when it refuses, as a person can use it: the same for all that mount from it."""

import re
from urllib.parse import parse_qs

_EXPIRED = re.compile(r"specified time frame|[Ee]xpired|not valid in the", re.S)
_DENIED = re.compile(r"AuthenticationFailed|NoAuthenticationInformation|InvalidAuthenticationInfo|failed to authenticate", re.S)
_FORBIDDEN = re.compile(
    r"AuthorizationPermissionMismatch|AuthorizationResourceTypeMismatch|AuthorizationServiceMismatch|AuthorizationFailure"
    r"|InsufficientAccountPermissions|AuthorizationProtocolMismatch"
)
_ADDRESS = re.compile(r"AuthorizationSourceIPMismatch")
_NO_SHARE = re.compile(
    r"ShareNotFound|ContainerNotFound|ShareBeingDeleted|ContainerBeingDeleted|ResourceNotFound|directory not found"
)
_GONE = re.compile(r"ShareNotFound|ContainerNotFound|ShareBeingDeleted|ContainerBeingDeleted")
_FULL = re.compile(r"ShareSizeLimitReached|ShareUsageBytesReached|InsufficientStorage|AccountLimitReached")
_NO_HOST = re.compile(r"no such host|Name or service not known|server misbehaving|name resolution", re.I)
_NO_WAY = re.compile(
    r"connection refused|no route to host|network is unreachable|i/o timeout|timed out|dial tcp|deadline exceeded", re.I
)
_CERTIFICATE = re.compile(r"x509|certificate", re.I)
_BAD_KEY = re.compile(r"illegal base64|decode account key", re.I)

# Asking again changes nothing about these.
_REFUSED = (_EXPIRED, _DENIED, _FORBIDDEN, _ADDRESS, _GONE, _BAD_KEY, _FULL)


def is_refused(said: str) -> bool:
    """Whether the service has refused for good: asking again would bring the same answer."""
    return any(pattern.search(said) for pattern in _REFUSED)


def is_missing(said: str) -> bool:
    """Whether what was asked for isn't there. Of a file this may only mean that a lost answer was asked for twice."""
    return bool(_NO_SHARE.search(said))


def explain(said: str, what: str, host: str, sas: str, folder: str = "") -> str:
    """The cause and the remedy behind what was said; empty if it isn't known.

    Args:
        what: ``share`` or ``container``.
        host: where it lies: name and port.
        sas: the SAS that was used; empty: an account key.
        folder: the folder in it that was asked for.
    """
    credential = "SAS" if sas else "account key"
    if _BAD_KEY.search(said):
        return "the account key is not one (it is base64 text); give the one that the portal shows"
    if _ADDRESS.search(said):
        return "the SAS or the account's firewall does not allow this node's address"
    if sas and _EXPIRED.search(said):
        ends = parse_qs(sas).get("se", [""])[0]
        return "the SAS is not valid now%s; make a new one, or set the node's clock" % (
            " (it ends at %s)" % ends if ends else ""
        )
    if _FORBIDDEN.search(said):
        return (
            "the %s does not allow it: it has to permit reading, listing, and for results creating, writing and deleting"
            % credential
        )
    if _DENIED.search(said):
        return "%s refused the %s: it is another account's, has been renewed, or the node's clock is wrong" % (host, credential)
    if _NO_SHARE.search(said):
        where = (
            "no folder '%s' in the %s" % (folder, what)
            if folder and "ShareNotFound" not in said and "ContainerNotFound" not in said
            else "no such %s in the account" % what
        )
        return "there is %s; create it, or correct the address" % where
    if _FULL.search(said):
        return "the %s is full; free some space, or raise its quota" % what
    if _NO_HOST.search(said):
        name = host.rpartition(":")[0]
        return "the name %s is not known there; correct the account's name, or mend the node's name service" % name
    if _CERTIFICATE.search(said):
        return "the certificate of %s is not trusted there; set SSL_CERT_FILE on the node to the CA that it needs" % host
    if _NO_WAY.search(said):
        return "%s can't be reached from there; open its port, or set https_proxy on the node" % host
    return ""
