"""Every error that podgraph raises on purpose.

A message says what was wrong, what was got, what is allowed, and what to do next, on one line where it can.
"""


class PodgraphError(Exception):
    """Base class: the command line prints it as one line and exits with 1."""


class ConfigError(PodgraphError):
    """A YAML file, a bucket list or a specification that cannot be built."""


class BatchError(PodgraphError):
    """One step's metadata is inconsistent (shapes, lengths, page indices)."""


class BucketOverflow(PodgraphError):
    """A batch was planned into a bucket that does not hold it."""


class BucketMiss(PodgraphError):
    """No bucket holds a batch as it is, and it is not to be cut.

    Attributes:
        reason: as counters name it.
    """

    def __init__(self, message: str, reason: str = "no bucket holds the batch") -> None:
        super().__init__(message)
        self.reason = reason


class CatalogError(PodgraphError):
    """A catalog file is damaged, of another format version, or cannot be written."""


class FingerprintMismatch(CatalogError):
    """A catalog was built for another GPU, driver or specification."""


class CompileError(PodgraphError):
    """nvcc or FlashInfer's headers are missing, or a kernel did not compile as it must."""


class CaptureError(PodgraphError):
    """A captured graph holds something that a catalog cannot store or relocate."""


class CudaError(PodgraphError):
    """A CUDA driver call failed."""


class VerificationError(PodgraphError):
    """A catalog replayed something else than it should."""


class TraceError(PodgraphError):
    """A request trace cannot be read."""
