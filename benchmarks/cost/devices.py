"""Devices: how mergekit is told to use one, how to time what runs on it, and its memory."""

import torch


def options(device: str) -> list[str]:
    """Return mergekit's options for a device."""
    return {"cpu": [], "cuda": ["--cuda"]}.get(device, ["--device", device])


def device_of(options: list[str]) -> str:
    """Return the device that mergekit is told to compute on."""
    if "--device" in options:
        return options[options.index("--device") + 1]
    return "cuda" if "--cuda" in options else "cpu"


def wait_for(device: str) -> None:
    """Wait until everything that was asked of a device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: str) -> None:
    """Begin to look for the peak of allocated memory."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: str) -> float:
    """Return the most memory that was allocated on a device, in MiB; 0 on the CPU."""
    if torch.device(device).type != "cuda":
        return 0.0
    return torch.cuda.max_memory_allocated(device) / 2**20


def described(device: str) -> dict[str, object]:
    """Return what a device is."""
    if torch.device(device).type != "cuda":
        return {"device": device}
    of = torch.cuda.get_device_properties(device)
    return {"device": of.name, "memory": of.total_memory / 2**20, "cuda": torch.version.cuda}
