"""Typical devices, described for work without a GPU: compiling ahead of time, planning memory."""

from __future__ import annotations

from tinyvllm.driver.spec import DeviceInfo

KIB, GIB = 1 << 10, 1 << 30

# By architecture. Shared memory is what a block may use after opting in.
DEVICES = {
    "sm_80": DeviceInfo("A100", (8, 0), 108, 163 * KIB, 80 * GIB),
    "sm_86": DeviceInfo("A40", (8, 6), 84, 99 * KIB, 48 * GIB),
    "sm_89": DeviceInfo("L40S", (8, 9), 142, 99 * KIB, 48 * GIB),
    "sm_90a": DeviceInfo("H200", (9, 0), 132, 227 * KIB, 140 * GIB, "hopper"),
    "sm_100": DeviceInfo("B200", (10, 0), 148, 227 * KIB, 180 * GIB),
    "sm_120": DeviceInfo("RTX 5090", (12, 0), 170, 99 * KIB, 32 * GIB),
}
DEVICES_BY_NAME = {device.name: device for device in DEVICES.values()}
