/* Host directories and files in a sandbox: prepared by the node agent as detached read-only mounts, attached by the sandbox's child. */
#ifndef BARCHAN_DATA_MOUNTS_H
#define BARCHAN_DATA_MOUNTS_H
#include <stdint.h>

/* The spawner's side: one datagram for each, after the order. */
int data_send(int link, int mount, const char *target);

/* The child's side, its working directory the new root: receive `count` mounts and attach each at its target, which is made
 * where it is missing. The image is not trusted: links in it lead to places within the root's own file system or nowhere. A link
 * where a file shall be is covered itself. */
int data_attach(int link, uint32_t count);

/* There too: /etc/hosts, where there is nothing of that name. */
int hosts_make(const char *hostname);
#endif
