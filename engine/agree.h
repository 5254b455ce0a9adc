/* engine/agree.h - how far a chat that came back as text is the one that is stored.
 *
 * Responsible for: comparing the token ids of a stored session with those that a request was
 * rendered to, as text and control tokens rather than as ids: text that was generated is seldom
 * cut into tokens as the tokenizer would cut it. The stored ids win up to the first real
 * difference, and where that is, is said.
 * Not responsible for: rendering (model/template.h), finding candidates, going back (session.h).
 *
 * What is no difference: another cut of the same bytes; U+FFFD where a stored answer has bytes that
 * are no character, since that is what was shown; control tokens inside a stored answer that do not
 * end it and are never shown; a line end as CR LF on one side and LF on the other; a reasoning
 * block of white space on one side; with a Llama-3 template white space around a stored answer,
 * which the template takes away; with AGREE_DROPPED_REASONING any reasoning block in a stored
 * answer. What people wrote as the text of a control token is text: it never stands for the token.
 *
 * Threads: pure; as the tokenizer.
 * Units: token indices from the start of each list.
 */
#ifndef ENGINE_AGREE_H
#define ENGINE_AGREE_H

#include "engine/image.h"
#include "engine/model/template.h"

enum { AGREE_DROPPED_REASONING = 1 };

enum agree_end {
    AGREE_SAME,         /* both end here */
    AGREE_STORED_ENDS,  /* the request goes on: the rest of it is new */
    AGREE_REQUEST_ENDS, /* the session goes on: the request is an earlier state of it */
    AGREE_TEXT,         /* other text */
    AGREE_CONTROL,      /* a control token on one side only, or two different ones */
    AGREE_REASONING     /* the stored answer reasons and the request leaves that out */
};

struct agree_args {
    const struct tokenizer *tokenizer;
    const struct template *tmpl;
    const uint32_t *stored;
    uint64_t stored_count;
    const struct image_span *roles; /* of the stored ids, in order; NULL: none is an answer */
    uint32_t role_count;
    const uint32_t *request; /* the whole chat, as template_ids gives it */
    uint64_t request_count;
    unsigned flags;
};

struct agree {
    /* The first `stored_tokens` stored ids stand for the first `request_tokens` of the request: the
     * session may go on from there with request[request_tokens …). Both lists have a token boundary
     * there, and no character is cut. */
    uint64_t stored_tokens, request_tokens;
    /* The stored token in which the first character that differs begins; stored_count when none
     * does. At least stored_tokens. */
    uint64_t differ_token;
    enum agree_end end;
    uint64_t passed; /* bytes and control tokens passed over as no difference */
};

void agree_find(const struct agree_args *args, struct agree *agree_out);

#endif
