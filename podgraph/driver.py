"""The CUDA driver, through cuda-bindings: the only file that names it.

Thin on purpose: handles stay plain integers or the binding's own objects, every call is checked, and nothing here knows
what a catalog is. Importing this file needs no GPU; `open_device` does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from podgraph.errors import CudaError

# Driver API calls return (status, results...). The binding has no type stubs: its objects are Any here.
Handle = Any

GRAPH_KERNEL_NODE = "CU_GRAPH_NODE_TYPE_KERNEL"


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise CudaError("cuda-bindings is not installed: pip install 'podgraph[cuda]'") from e
    return driver


def call(name: str, *args: Any) -> Any:
    """Calls a driver function and returns its results, without the status.

    Raises:
        CudaError: naming the function and the driver's own error.
    """
    driver = _driver()
    try:
        status, *results = getattr(driver, name)(*args)
    except (RuntimeError, AttributeError) as e:  # no libcuda, or one that is too old for the function
        raise CudaError(f"{name}: this machine has no CUDA driver, or one that is too old") from e
    if int(status) != 0:
        text = driver.cuGetErrorString(status)[1]
        raise CudaError(f"{name}: {status.name}: {text.decode() if text else 'unknown error'}")
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True)
class Device:
    """One GPU with its primary context, the one that torch uses.

    Attributes:
        ordinal: its number.
        name: the product's name.
        compute_capability: such as ``9.0``.
        sm_count: multiprocessors.
        driver_version: as the driver reports it, 13000 for CUDA 13.0.
    """

    ordinal: int
    name: str
    compute_capability: str
    sm_count: int
    driver_version: int


def open_device(ordinal: int = 0) -> Device:
    """Initialises the driver and makes the device's primary context current in this thread.

    Raises:
        CudaError: no driver, or no such device.
    """
    driver = _driver()
    call("cuInit", 0)
    count = call("cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise CudaError(f"device {ordinal}: this machine has {count} CUDA devices")
    device = call("cuDeviceGet", ordinal)
    attribute = driver.CUdevice_attribute

    def ask(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    return Device(
        ordinal=ordinal,
        name=call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
        compute_capability=f"{ask('COMPUTE_CAPABILITY_MAJOR')}.{ask('COMPUTE_CAPABILITY_MINOR')}",
        sm_count=ask("MULTIPROCESSOR_COUNT"),
        driver_version=int(call("cuDriverGetVersion")),
    )


def current_context() -> Handle:
    """The calling thread's context."""
    return call("cuCtxGetCurrent")


def make_current(context: Handle) -> None:
    """Makes a context the calling thread's."""
    call("cuCtxSetCurrent", context)


def free_memory() -> int:
    """Bytes of device memory that are free, as the driver says."""
    return int(call("cuMemGetInfo")[0])


def synchronize() -> None:
    call("cuCtxSynchronize")


# --- images and functions ------------------------------------------------------------------------------------------


class Image:
    """A loaded cubin."""

    def __init__(self, cubin: bytes) -> None:
        self._library = call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        self._shared_bytes: dict[str, int] = {}  # that each function is allowed

    def function(self, name: str, shared_bytes: int, params_bytes: int) -> Handle:
        """A kernel by its entry name, allowed to use ``shared_bytes`` of dynamic shared memory.

        Raises:
            CudaError: no such kernel, or it does not take one struct of ``params_bytes``: the driver would read beyond.
        """
        kernel = call("cuLibraryGetKernel", self._library, name.encode())
        function = call("cuKernelGetFunction", kernel)
        sizes = _param_sizes(function)
        if sizes != [params_bytes]:
            raise CudaError(f"kernel {name}: takes parameters of {sizes} bytes, allowed: one of {params_bytes} bytes")
        limit = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # never less than somebody else was allowed before
        self._shared_bytes[name] = max(shared_bytes, self._shared_bytes.get(name, 0))
        call("cuFuncSetAttribute", function, limit, self._shared_bytes[name])
        return function

    def close(self) -> None:
        if self._library is not None:
            call("cuLibraryUnload", self._library)
            self._library = None


# --- memory --------------------------------------------------------------------------------------------------------


class Memory:
    """A plain device allocation; its address never changes until `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pointer = call("cuMemAlloc", size)
        self.address = int(self._pointer)

    def fill(self, byte: int, stream: int = 0) -> None:
        call("cuMemsetD8Async", self.address, byte, self.size, stream)

    def close(self) -> None:
        if self._pointer is not None:
            call("cuMemFree", self._pointer)
            self._pointer = None


class PinnedMemory:
    """Page-locked host memory, as a ctypes buffer."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pointer = call("cuMemHostAlloc", size, 0)
        self.address = int(self._pointer)
        self.buffer = (ctypes.c_uint8 * size).from_address(self.address)

    def close(self) -> None:
        if self._pointer is not None:
            call("cuMemFreeHost", self._pointer)
            self._pointer = None


def tensor_map(
    address: int,
    element: str,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    promote_l2: bool,
) -> bytes:
    """A TMA descriptor for tiles of 16-bit elements in 128-byte swizzle; what lies outside the tensor reads as zero.

    Args:
        address: of the tensor in device memory, on 16 bytes.
        element: ``bfloat16`` or ``float16``.
        sizes: elements by dimension, the contiguous one first.
        strides: bytes by dimension, from the second one on.
        box: elements of one tile by dimension.
        promote_l2: fetch 256 bytes around what is missing in L2.

    Returns:
        128 bytes.

    Raises:
        CudaError: the driver does not take such a tensor.
    """
    d = _driver()
    kinds = {
        "bfloat16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }
    promotion = d.CUtensorMapL2promotion
    encoded = call(
        "cuTensorMapEncodeTiled",
        kinds[element],
        len(sizes),
        address,
        [d.cuuint64_t(n) for n in sizes],
        [d.cuuint64_t(n) for n in strides],
        [d.cuuint32_t(n) for n in box],
        [d.cuuint32_t(1)] * len(sizes),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B if promote_l2 else promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)


def copy_to_device(target: int, source: int, size: int, stream: int) -> None:
    call("cuMemcpyHtoDAsync", target, source, size, stream)


def is_device_address(word: int) -> bool:
    """Whether a 64-bit word is an address that the driver knows as device (or managed) memory."""
    driver = _driver()
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, value = driver.cuPointerGetAttribute(kind, word)
    return int(status) == 0 and int(value) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)


# --- events and launches -------------------------------------------------------------------------------------------


class Event:
    """An event without timing."""

    def __init__(self) -> None:
        self._event = call("cuEventCreate", _driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def record(self, stream: int) -> None:
        call("cuEventRecord", self._event, stream)

    def wait(self) -> None:
        """Blocks the host until the recorded work is done; returns at once where nothing was recorded."""
        call("cuEventSynchronize", self._event)

    def close(self) -> None:
        if self._event is not None:
            call("cuEventDestroy", self._event)
            self._event = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch with its only parameter, a struct passed by value."""

    function: Handle
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes

    def enqueue(self, stream: int) -> None:
        buffer = ctypes.create_string_buffer(self.params, len(self.params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        call(
            "cuLaunchKernel",
            self.function,
            *self.grid,
            *self.block,
            self.shared_bytes,
            stream,
            ctypes.addressof(pointers),
            0,
        )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver's cuda.h: one argument in the place of eight."""

    _fields_ = [
        ("sizes", ctypes.c_uint * 7),  # grid, block, dynamic shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Kernel:
    """A launch whose parameters change in place, for what is launched again and again.

    Args:
        launch: what it starts as.
        params: where the parameters lie instead, shared with other kernels that take the same ones.

    Attributes:
        params: the struct's bytes; the next `enqueue`, `Graph.add_kernel` or `Exec.set_kernel` reads them.
    """

    def __init__(self, launch: Launch, params: bytearray | None = None) -> None:
        self.params = bytearray(launch.params) if params is None else params
        buffer = (ctypes.c_char * len(self.params)).from_buffer(self.params)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._keep: tuple[Any, ...] = buffer, pointers
        self._launch = launch
        self._pointers = ctypes.addressof(pointers)
        self._calls: dict[tuple[int, int], Callable[[], int]] = {}  # by stream and threads
        self.node = _node_params(launch, self._pointers)
        self.node_address = int(self.node.getPtr())

    def launcher(self, stream: int, threads: int = 0) -> Callable[[], int]:
        """What launches it on a stream, with another number of threads in x where one is given.

        It returns the driver's status, which is 0 where all is well: see `fail_launch`.
        """
        call = self._calls.get((stream, threads))
        if call is None:
            launch = self._launch
            block = (threads, 1, 1) if threads else launch.block
            config = _LaunchConfig((ctypes.c_uint * 7)(*launch.grid, *block, launch.shared_bytes), stream)
            self._keep += (config,)
            function, pointers = ctypes.c_void_p(int(launch.function)), ctypes.c_void_p(self._pointers)
            call = _hot("cuLaunchKernelEx", ctypes.byref(config), function, pointers, ctypes.c_void_p(None))
            self._calls[stream, threads] = call
        return call

    def enqueue(self, stream: int, threads: int = 0) -> None:
        """Launches it."""
        status = self.launcher(stream, threads)()
        if status:
            fail_launch(status)


def is_capturing(stream: int) -> bool:
    return CaptureProbe(stream)()


class CaptureProbe:
    """Asks again and again whether a stream is being captured. For one thread at a time."""

    def __init__(self, stream: int) -> None:
        self._status = ctypes.c_int()
        self._ask = _hot("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(self._status))

    def __call__(self) -> bool:
        status = self._ask()
        if status:
            _fail("cuStreamIsCapturing", status)
        return self._status.value != 0


def capture_id(stream: int) -> int:
    """A number that names the capture that a stream is in; 0 where it is in none."""
    return int(call("cuStreamGetCaptureInfo", stream)[1]) if is_capturing(stream) else 0


def _hot(name: str, *args: Any) -> Callable[[], int]:
    """A call of a step, which goes to the driver's library directly, with arguments converted once.

    Converting them each time, as the binding does, would take as long as the driver itself.
    """
    return functools.partial(_hot_function(name), *args)


@functools.cache
def _hot_function(name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as e:
        raise CudaError(f"{name}: this machine has no CUDA driver, or one that is too old") from e
    function.restype = ctypes.c_int
    return function


def _fail(name: str, status: int) -> NoReturn:
    driver = _driver()
    result = driver.CUresult(status)
    text = driver.cuGetErrorString(result)[1]
    raise CudaError(f"{name}: {result.name}: {text.decode() if text else 'unknown error'}")


# --- graphs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeInfo:
    """A node of a captured graph, as the driver describes it. Kernel fields are empty for other kinds."""

    kind: str
    function: int = 0
    function_name: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared_bytes: int = 0
    params: tuple[bytes, ...] = ()
    attributes: tuple[tuple[str, int], ...] = ()


class Graph:
    """A CUDA graph that this object owns."""

    def __init__(self, handle: Handle = None) -> None:
        self._graph = handle if handle is not None else call("cuGraphCreate", 0)
        self._nodes: list[Handle] = []

    @classmethod
    def capture(cls, launches: Sequence[Launch]) -> Graph:
        """Captures launches from a stream of their own; nothing runs."""
        driver = _driver()
        stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            try:
                for launch in launches:
                    launch.enqueue(int(stream))
            finally:
                graph = call("cuStreamEndCapture", stream)
        finally:
            call("cuStreamDestroy", stream)
        return cls(graph)

    def describe(self) -> tuple[list[NodeInfo], list[tuple[int, int, bytes]]]:
        """Nodes, and edges as (source, target, edge data of 8 bytes), both in the driver's order."""
        count = call("cuGraphGetNodes", self._graph, 0)[1]
        nodes = call("cuGraphGetNodes", self._graph, count)[0][:count] if count else []
        number = {int(node): i for i, node in enumerate(nodes)}
        count = call("cuGraphGetEdges", self._graph, 0)[3]
        edges: list[tuple[int, int, bytes]] = []
        if count:
            sources, targets, data, _ = call("cuGraphGetEdges", self._graph, count)
            for source, target, item in zip(sources[:count], targets[:count], data[:count], strict=True):
                edges.append((number[int(source)], number[int(target)], ctypes.string_at(int(item.getPtr()), 8)))
        return [_describe_node(node) for node in nodes], edges

    def add_kernel(self, kernel: Kernel) -> int:
        """Adds a node without dependencies and returns its number."""
        self._nodes.append(call("cuGraphAddKernelNode", self._graph, [], 0, kernel.node))
        return len(self._nodes) - 1

    def add_edge(self, source: int, target: int, data: bytes) -> None:
        edge = _driver().CUgraphEdgeData()
        ctypes.memmove(int(edge.getPtr()), data, 8)
        # one at a time: drivers 580 to 610 apply the first record's data to a whole bulk call
        call("cuGraphAddDependencies", self._graph, [self._nodes[source]], [self._nodes[target]], [edge], 1)

    def instantiate(self) -> Exec:
        return Exec(call("cuGraphInstantiate", self._graph, 0), self._nodes)

    def close(self) -> None:
        if self._graph is not None:
            call("cuGraphDestroy", self._graph)
            self._graph = None


class Exec:
    """An executable graph. Node handles of the graph that it came from stay valid for updates."""

    def __init__(self, handle: Handle, nodes: list[Handle]) -> None:
        self._exec, self._nodes = handle, [ctypes.c_void_p(int(node)) for node in nodes]
        self._handle = ctypes.c_void_p(int(handle))
        self._sets: dict[tuple[int, int], Callable[[], int]] = {}  # by node and address of its parameters
        self._launches: dict[int, Callable[[], int]] = {}  # by stream

    def upload(self, stream: int) -> None:
        call("cuGraphUpload", self._exec, stream)

    def set_kernel(self, node: int, kernel: Kernel) -> None:
        """Changes a node's parameters for future launches; launches under way keep the old ones."""
        call = self._sets.get((node, kernel.node_address))
        if call is None:
            params = ctypes.c_void_p(kernel.node_address)
            call = _hot("cuGraphExecKernelNodeSetParams_v2", self._handle, self._nodes[node], params)
            self._sets[node, kernel.node_address] = call
        status = call()
        if status:
            _fail("cuGraphExecKernelNodeSetParams", status)

    def launcher(self, stream: int) -> Callable[[], int]:
        """What launches it on a stream, and returns the driver's status."""
        if stream not in self._launches:
            self._launches[stream] = _hot("cuGraphLaunch", self._handle, ctypes.c_void_p(stream))
        return self._launches[stream]

    def launch(self, stream: int) -> None:
        status = self.launcher(stream)()
        if status:
            fail_launch(status)

    def close(self) -> None:
        if self._exec is not None:
            call("cuGraphExecDestroy", self._exec)
            self._exec = None


def fail_launch(status: int) -> NoReturn:
    """Raises what a launcher's status means."""
    _fail("launch", status)


def _node_params(launch: Launch, pointers: int) -> Handle:
    """The binding's parameter object; ``pointers`` is the address of the kernel's array of parameter addresses."""
    params = _driver().CUDA_KERNEL_NODE_PARAMS()
    params.func = launch.function
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared_bytes
    params.kernelParams = pointers
    return params


def _param_sizes(function: Handle) -> list[int]:
    """Bytes of each parameter of a kernel."""
    sizes: list[int] = []
    while True:
        status, _, size = _driver().cuFuncGetParamInfo(function, len(sizes))
        if int(status) != 0:  # past the last one
            return sizes
        sizes.append(int(size))


def _describe_node(node: Handle) -> NodeInfo:
    driver = _driver()
    kind = call("cuGraphNodeGetType", node).name
    if kind != GRAPH_KERNEL_NODE:
        return NodeInfo(kind)
    params = call("cuGraphKernelNodeGetParams", node)
    blobs = []
    for index, size in enumerate(_param_sizes(params.func)):
        address = ctypes.c_void_p.from_address(int(params.kernelParams) + 8 * index).value
        blobs.append(ctypes.string_at(address, size) if address else b"")
    attributes = []
    ids = driver.CUkernelNodeAttrID
    for name, field in (
        ("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", "cooperative"),
        ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", "clusterDim"),
        ("CU_LAUNCH_ATTRIBUTE_PRIORITY", "priority"),
        ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed"),
    ):
        status, value = driver.cuGraphKernelNodeGetAttribute(node, getattr(ids, name))
        if int(status) == 0:
            got = getattr(value, field)
            attributes.append((field, int(got.x) if field == "clusterDim" else int(got)))
    return NodeInfo(
        kind=kind,
        # as a number: the binding's handle points into `params`, and reads garbage once that is gone
        function=int(params.func),
        function_name=call("cuFuncGetName", params.func).decode(),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        shared_bytes=params.sharedMemBytes,
        params=tuple(blobs),
        attributes=tuple(attributes),
    )
