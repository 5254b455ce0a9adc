/* tools/daemon_notify.h - telling the service manager how far the daemon is.
 *
 * Responsible for: one datagram to the socket that systemd names, when there is one.
 * Not responsible for: watchdogs.
 *
 * Threads: any.
 * Units: none.
 */
#ifndef TOOLS_DAEMON_NOTIFY_H
#define TOOLS_DAEMON_NOTIFY_H

/* "READY=1", "STOPPING=1". Nobody to tell is no error. */
void daemon_notify(const char *state);

#endif
