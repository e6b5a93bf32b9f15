"""The one exception of this folder, which may not import the package's own."""


class HorovodBuildError(Exception):
    """The wheel could not be built; ``str(error)`` is one sentence, at times with the last lines of a log."""
