"""A telecom technician that works tickets from what the tools tell it: for warm starts in solo mode.

It never looks at a task's gold actions or initial state, only at the ticket and at tool results, so what it
demonstrates can be learnt from what the policy sees. It checks in the order of the benchmark's
manual: the customer's line, the phone's connection, the account, then what mobile data and picture messages need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from datetime import date
from typing import Any

from megatron_async.rollout.environments.base import Message, ToolCall

TODAY = date(2025, 2, 25)
"""The day it is in the telecom domain (its policy says so)."""

Script = Generator[Message, str, None]
Steps = Generator[Message, str, Any]


@dataclass(slots=True)
class _Ticket:
    """What the ticket says."""

    phone: str
    abroad: bool
    messages: bool
    data: bool
    calls: int = 0

    @classmethod
    def read(cls, text: str) -> _Ticket:
        number = re.search(r"phone number: ([\d-]+\d)", text)
        if number is None:
            raise ValueError(f"the ticket names no phone number: {text!r}")
        messages = "MMS" in text
        return cls(number[1], "abroad" in text, messages, messages or "mobile data" in text)


def technician(ticket: str) -> Script:
    """The turns of one ticket; each result is sent back. ValueError for a ticket without a phone number."""
    job = _Ticket.read(ticket)
    customer = json.loads((yield from _call(job, "get_customer_by_phone", phone_number=job.phone)))
    line = yield from _line(job, customer)
    solvable = yield from _connect(job, customer, line)
    if solvable and job.data:
        yield from _mobile_data(job, customer, line)
    if solvable and job.messages:
        yield from _picture_messages(job)
    if not solvable:
        yield from _call(job, "transfer_to_human_agents", summary="I cannot fix the issue.")
    yield from _call(job, "done")


def _call(job: _Ticket, name: str, **arguments: Any) -> Steps:
    job.calls += 1
    result = yield Message("assistant", "", (ToolCall(name, arguments, f"call_{job.calls}"),))
    return result


def _line(job: _Ticket, customer: dict[str, Any]) -> Steps:
    """The customer's line with the ticket's number."""
    line: dict[str, Any] = {}
    for line_id in customer["line_ids"]:
        line = json.loads((yield from _call(job, "get_details_by_id", id=line_id)))
        if line["phone_number"] == job.phone:
            break
    return line


def _connect(job: _Ticket, customer: dict[str, Any], line: dict[str, Any]) -> Steps:
    """Restore service; False when only a human agent can."""
    status = yield from _call(job, "check_network_status")
    if "Airplane Mode: ON" in status:
        yield from _call(job, "toggle_airplane_mode")
    if "SIM Card Status: missing" in status:
        yield from _call(job, "reseat_sim_card")
        status = yield from _call(job, "check_network_status")
    if "SIM Card Status: locked" in status:
        return False
    if line["status"] == "Suspended":
        end = line["contract_end_date"]
        if end is not None and date.fromisoformat(end) < TODAY:
            return False
        yield from _pay(job, customer, line)
    settings = yield from _call(job, "check_apn_settings")
    if "APN Name: broken" in settings or "Not Set" in settings:
        yield from _call(job, "reset_apn_settings")
        yield from _call(job, "reboot_device")
    return True


def _pay(job: _Ticket, customer: dict[str, Any], line: dict[str, Any]) -> Steps:
    """Have the overdue bills paid and the line resumed."""
    bills = json.loads((yield from _call(job, "get_bills_for_customer", customer_id=customer["customer_id"])))
    for bill in bills:
        if bill["status"] != "Overdue":
            continue
        owner = customer["customer_id"]
        yield from _call(job, "send_payment_request", customer_id=owner, bill_id=bill["bill_id"])
        yield from _call(job, "check_payment_request")
        yield from _call(job, "make_payment")
    yield from _call(job, "resume_line", customer_id=customer["customer_id"], line_id=line["line_id"])
    yield from _call(job, "reboot_device")


def _mobile_data(job: _Ticket, customer: dict[str, Any], line: dict[str, Any]) -> Steps:
    """What keeps mobile data from working, or from being fast."""
    owner = {"customer_id": customer["customer_id"], "line_id": line["line_id"]}
    status = yield from _call(job, "check_network_status")
    if "Mobile Data Enabled: No" in status:
        yield from _call(job, "toggle_data")
    if job.abroad:
        if "Data Roaming Enabled: No" in status:
            yield from _call(job, "toggle_roaming")
        if not line["roaming_enabled"]:
            yield from _call(job, "enable_roaming", **owner)
    plan = json.loads((yield from _call(job, "get_details_by_id", id=line["plan_id"])))
    if line["data_used_gb"] >= plan["data_limit_gb"] + line["data_refueling_gb"]:
        yield from _call(job, "refuel_data", **owner, gb_amount=2.0)
    mode = yield from _call(job, "check_network_mode_preference")
    if "4g_5g_preferred" not in mode:
        yield from _call(job, "set_network_mode_preference", mode="4g_5g_preferred")
    if not job.messages:
        saver = yield from _call(job, "check_data_restriction_status")
        if "Data Saver mode is ON" in saver:
            yield from _call(job, "toggle_data_saver_mode")
        tunnel = yield from _call(job, "check_vpn_status")
        if "VPN is ON" in tunnel:
            yield from _call(job, "disconnect_vpn")


def _picture_messages(job: _Ticket) -> Steps:
    """What keeps picture messages from being sent although mobile data works."""
    calling = yield from _call(job, "check_wifi_calling_status")
    if "turned ON" in calling:
        yield from _call(job, "toggle_wifi_calling")
    granted = yield from _call(job, "check_app_permissions", app_name="messaging")
    for permission in ("storage", "sms"):
        if permission not in granted:
            yield from _call(job, "grant_app_permission", app_name="messaging", permission=permission)
